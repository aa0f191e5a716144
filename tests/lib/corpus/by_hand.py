"""The models of architectures.py: variants of transformers' models, and hybrids."""

import functools

import architectures

from corpus.step import Entry

BY_HAND = {
    name: Entry(
        "transformers, with options",
        functools.partial(architectures.case, name),
        architectures.near(name),
        architectures.least(name),
    )
    for name in architectures.ARCHITECTURES
}
