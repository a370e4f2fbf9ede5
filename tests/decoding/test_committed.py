"""What a head is handed is what was committed, row by row, however even or uneven the rows are."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.committed import Committed


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.booleans(), st.data())
def test_tokens_and_states_come_back_by_position(rows, alike, data):
    """alike: the rows keep the same tokens of every step, as a single row does; they then go by slices."""
    committed, texts, number = Committed(rows, capacity=4), [[] for _ in range(rows)], 0
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        width = data.draw(st.integers(1, 4), label="width")
        line = st.lists(st.booleans(), min_size=width, max_size=width)
        keep = [data.draw(line, label="keep")] * rows if alike else [data.draw(line) for _ in range(rows)]
        tokens = torch.arange(number, number + rows * width).view(rows, width)
        number += rows * width
        committed.extend(tokens, tokens[..., None].float(), torch.tensor(keep))
        for text, new, kept in zip(texts, tokens.tolist(), keep, strict=True):
            text += [token for token, true in zip(new, kept, strict=True) if true]
    assert committed.lengths == [len(text) for text in texts]
    starts = [data.draw(st.integers(0, len(text)), label="start") for text in texts]
    starts = [min(starts)] * rows if alike else starts
    tokens, states, counts = committed.since(starts)
    for row, text in enumerate(texts):
        assert tokens[row, : counts[row]].tolist() == text[starts[row] :]
        assert states[row, : counts[row]].flatten().tolist() == text[starts[row] :]
