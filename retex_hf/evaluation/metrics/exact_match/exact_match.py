"""Share of generated texts that are the right answer, word for word."""

import string
from collections.abc import Sequence

import datasets
import evaluate

DESCRIPTION = """
Exact match: the share of predicted texts that equal their reference. White space at the ends is ignored, and so is case
unless asked otherwise. Punctuation and English articles count unless `ignore_punctuation` or `ignore_articles` is set;
SQuAD's rule is both of them.
"""

INPUTS = """
Args:
    predictions: Generated texts.
    references: The right text of each.
    ignore_case: Treat capital and small letters alike (default: True).
    ignore_punctuation: Leave out ASCII punctuation first (default: False).
    ignore_articles: Leave out the words a, an and the (default: False).
Returns:
    exact_match: Between 0 and 1.
"""

ARTICLES = {"a", "an", "the"}


def canonical(
    text: str, ignore_case: bool = True, ignore_punctuation: bool = False, ignore_articles: bool = False
) -> str:
    """Return the normalised form of a text, which is compared.

    >>> from retex_hf.evaluation.metrics.exact_match.exact_match import canonical
    >>> canonical(" The Cat. "), canonical("The  cat.", ignore_punctuation=True, ignore_articles=True)
    ('the cat.', 'cat')
    """
    text = text.strip()
    if ignore_case:
        text = text.casefold()
    if ignore_punctuation:
        text = text.translate(str.maketrans("", "", string.punctuation))
    if ignore_articles:
        text = " ".join(word for word in text.split() if word.casefold() not in ARTICLES)
    return text.strip()


def matches(prediction: str, reference: str, **options: bool) -> bool:
    """Return whether two texts are the same answer."""
    return canonical(prediction, **options) == canonical(reference, **options)


class ExactMatch(evaluate.Metric):
    """Exact match of texts."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(predictions=datasets.Value("string"), references=datasets.Value("string")),
        )

    def _compute(  # type: ignore[override]  # columns and options come by name
        self,
        predictions: Sequence[str],
        references: Sequence[str],
        ignore_case: bool = True,
        ignore_punctuation: bool = False,
        ignore_articles: bool = False,
    ) -> dict[str, float]:
        options = {
            "ignore_case": ignore_case,
            "ignore_punctuation": ignore_punctuation,
            "ignore_articles": ignore_articles,
        }
        right = [matches(found, true, **options) for found, true in zip(predictions, references, strict=True)]
        return {"exact_match": sum(right) / len(right)}
