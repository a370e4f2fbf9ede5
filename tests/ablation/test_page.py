"""The report's page and the README's figure, from made-up rows."""

import copy
import doctest
import importlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from page_rows import synthetic_example, synthetic_row, synthetic_rows

import ablation
from ablation.page import figure, page

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "input", "br"}


class Outline(HTMLParser):
    """Tags in order; fails where one is closed that is not open."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def outline(text):
    parser = Outline()
    parser.feed(text)
    assert parser.open == []
    return parser


def stripped(rows, *path):
    """The rows with null at a path."""
    rows = copy.deepcopy(rows)
    for row in rows:
        place = row
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = None
    return rows


def every_path(value, before=()):
    yield before
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from every_path(inner, (*before, key))
    elif isinstance(value, list) and value:
        yield from every_path(value[0], (*before, 0))


def test_the_page_is_whole_and_fetches_nothing():
    text = page(synthetic_rows(), synthetic_example())
    tags = [tag for tag, _ in outline(text).seen]
    assert {"title", "main", "table", "svg", "script"} <= set(tags)
    assert not {"link", "img", "iframe"} & set(tags)
    assert not re.findall(r"""(?:src|href)=|url\(|@import""", text)
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_every_picture_has_words_and_every_heading_of_a_table_is_a_button():
    seen = outline(page(synthetic_rows(), synthetic_example())).seen
    pictures = [attrs for tag, attrs in seen if tag == "svg"]
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for attrs in pictures)
    heads = [index for index, (tag, _) in enumerate(seen) if tag == "th"]
    assert heads
    assert all(seen[index + 1][0] == "button" for index in heads)


def test_every_setting_can_be_chosen_and_the_first_is_shown_first():
    seen = outline(page(synthetic_rows(), None)).seen
    sections = [attrs["data-view"] for tag, attrs in seen if tag == "section" and "data-view" in attrs]
    radios = [attrs for tag, attrs in seen if tag == "input"]
    assert [attrs["value"] for attrs in radios] == [*sections, "all"]
    assert ["checked" in attrs for attrs in radios] == [True, False, False, False]


def test_no_page_says_none_or_nan():
    text = page(synthetic_rows(), synthetic_example())
    assert not re.search(r"\b(None|nan|inf|NaN)\b", text.partition("<script>")[0])


KNOWN_BY = {"id", "setting", "network", "drafter", "seed"}
PATHS = [
    path
    for path in sorted(set(every_path(synthetic_row("joint", "joint", "ngram", 0))), key=str)
    if path and path[0] not in KNOWN_BY and path[-1] != "length"
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_missing_number_breaks_nothing(path):
    rows = stripped(
        [synthetic_row("joint", "joint", name, 0) for name in ("sequential", "parallel", "ngram")], *path
    )
    text = page(rows, None)  # has the figure in it
    assert not re.search(r"\b(None|nan)\b", text.partition("<script>")[0])


def test_nothing_at_all_is_told_as_such():
    assert "There are no rows yet" in page([], None)
    assert "no rows yet" in figure([])


def test_words_from_outside_are_escaped():
    rows = [synthetic_row("joint", "joint", "ngram", 0)]
    rows[0] |= {"setting": "a<i>&\"'", "network": "x<i>", "drafter": "drafter<i>", "machine": "<i>"}
    example = {"prompt": "<i>", "setting": "<i>", "drafters": {"<i>": [{"text": "<i>", "kind": "accepted"}]}}
    text = page(rows, example)
    outline(text)
    assert "<i>" not in text
    ElementTree.fromstring(figure(rows))


def test_the_example_marks_what_was_accepted():
    kinds = {"one": "accepted", "two": "accepted", "six": "next"}
    tokens = [{"text": text, "kind": kind} for text, kind in kinds.items()]
    text = page(synthetic_rows(), {"prompt": "p", "setting": "joint", "drafters": {"ngram": tokens}})
    assert "".join(f'<span class="{kind}">{word}</span>' for word, kind in kinds.items()) in text
    assert "2 of 3 tokens were drafted, 1 step, 3.00 tokens a step" in text


def test_the_figure_is_an_image_with_words_for_light_and_dark():
    root = ElementTree.fromstring(figure(synthetic_rows()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "sequential: τ at temperature 1" in root.attrib["aria-label"]
    assert "prefers-color-scheme: dark" in figure(synthetic_rows())


def test_rows_that_were_read_from_a_file_give_the_same_page():
    rows = synthetic_rows()
    read = [json.loads(json.dumps(row)) for row in rows]
    assert page(read, None) == page(rows, None)
    assert page(rows, None) == page(rows, None)


@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in Path(ablation.__file__).parent.glob("*.py")
        if path.stem.startswith("page") or path.stem == "charts"
    ),
)
def test_examples_in_the_docstrings_are_right(name):
    assert doctest.testmod(importlib.import_module(f"ablation.{name}")).failed == 0
