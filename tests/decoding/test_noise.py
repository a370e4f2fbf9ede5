"""The random numbers are uniform and independent, whichever part of their key changes."""

import pytest
import torch

from decoding import noise

SEEDS = torch.arange(2000)
ROLES = (noise.DRAFT, noise.ACCEPT, noise.NEXT)


def chi_square(u: torch.Tensor, cells: int) -> float:
    """Standard deviations of Pearson's statistic from its mean, for values in [0, 1) in equal cells."""
    counts = torch.bincount((u.flatten() * cells).long(), minlength=cells).double()
    assert len(counts) == cells
    expected, freedom = u.numel() / cells, cells - 1
    return ((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5).item()


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's, times the root of the number of values: about standard normal for independent numbers."""
    return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].item() * x.numel() ** 0.5


@pytest.mark.parametrize("role", ROLES)
def test_the_numbers_are_uniform(role):
    u = noise.uniforms(SEEDS, 3, role, 50)
    assert u.shape == (2000, 50)
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    scale = (12 * u.numel()) ** 0.5
    assert abs((u.mean() - 1 / 2).item()) * scale < 4
    assert abs((u**2).mean().item() - 1 / 3) * (u.numel() * 45 / 4) ** 0.5 < 4
    assert abs(chi_square(u, 1000)) < 4
    low_bits = (u * 2.0**53) % 2**12 / 2**12
    assert abs(chi_square(low_bits, 4096)) < 4


def test_pairs_of_neighbours_fill_the_square_evenly():
    """Nodes, steps, roles and seeds beside each other, in 32 x 32 cells."""
    u = noise.uniforms(SEEDS, 0, noise.DRAFT, 50)
    pairs = {
        "node": (u[:, 1:], u[:, :-1]),
        "seed": (u[1:], u[:-1]),
        "step": (u, noise.uniforms(SEEDS, 1, noise.DRAFT, 50)),
        "role": (u, noise.uniforms(SEEDS, 0, noise.ACCEPT, 50)),
        "diagonal": (u[1:, 1:], u[:-1, :-1]),
        "seed and step": (u[1:], noise.uniforms(SEEDS, 1, noise.DRAFT, 50)[:-1]),
    }
    for name, (x, y) in pairs.items():
        cell = ((x * 32).floor() + y) / 32  # the pair's row and, inside it, its column
        assert abs(chi_square(cell, 1024)) < 4, name
        assert abs(correlation(x, y)) < 4, name


@pytest.mark.parametrize("apart", [1, 2, 64, 2**20, 2**32, 2**61])
def test_seeds_however_far_apart_are_uncorrelated(apart):
    numbers = noise.uniforms(torch.tensor([5, 5 + apart]), 0, noise.NEXT, 20_000)
    assert abs(correlation(numbers[0], numbers[1])) < 4


def test_no_number_occurs_twice_over_rows_steps_roles_and_nodes():
    """480,000 numbers of 53 bits: two equal ones by chance once in 78,000 tries."""
    found = [noise.uniforms(SEEDS, step, role, 10) for step in range(8) for role in ROLES]
    everything = torch.cat([u.flatten() for u in found])
    assert len(everything.unique()) == len(everything)


def test_a_number_depends_on_its_own_key_alone():
    many = noise.uniforms(torch.tensor([4, 9, -3, 9]), 6, noise.ACCEPT, 12)
    alone = noise.uniforms(torch.tensor([9]), 6, noise.ACCEPT, 3)
    assert torch.equal(many[1], many[3])
    assert torch.equal(many[1, :3], alone[0])


def test_the_step_may_differ_from_row_to_row():
    seeds = torch.tensor([1, 2, 3])
    steps = torch.tensor([5, 0, 7])
    mixed = noise.uniforms(seeds, steps, noise.DRAFT, 4)
    for row in range(3):
        one = noise.uniforms(seeds[row : row + 1], int(steps[row]), noise.DRAFT, 4)
        assert torch.equal(mixed[row], one[0])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62, -(2**62), 2**63 - 1])
def test_every_seed_has_numbers(seed):
    u = noise.uniforms(torch.tensor([seed]), 0, noise.DRAFT, 1000)
    assert ((u >= 0) & (u < 1)).all()
    assert abs(chi_square(u, 20)) < 4


def test_the_bits_are_those_of_splitmix64s_finaliser():
    def reference(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    values = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 123456789]
    mixed = noise.mix(torch.tensor([noise.signed(value) for value in values]))
    assert [int(x) % 2**64 for x in mixed] == [reference(value) for value in values]


@pytest.mark.parametrize("role", ROLES)
def test_a_few_numbers_are_made_one_by_one_with_the_bits_of_many_made_at_once(role):
    seeds = torch.tensor([0, 9, -3, noise.SEEDS, -noise.SEEDS, 2**62 - 1])
    for step in (0, 6, 2**40):
        many = noise.uniforms(seeds, step, role, noise.FEW)  # more than FEW in all
        assert torch.equal(noise.uniforms(seeds, step, role, 5), many[:, :5])
        assert noise.uniforms(seeds, step, role, 0).shape == (6, 0)
