"""Chemical reactions as SMILES, made from templates: inputs for models of reactions where no data set is at hand.

Eight common kinds of reactions, between aromatic rings and amines, alcohols and boronic acids. Their SMILES are valid,
but not canonical, and less varied than those of patents, which such models are trained on.
"""

from __future__ import annotations

import random
from itertools import product

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# All groups are bound at their first atom.
RINGS = (
    "c1ccccc1",
    "c1ccc(F)cc1",
    "c1ccc(Cl)cc1",
    "c1ccc(C)cc1",
    "c1ccc(OC)cc1",
    "c1ccc(C#N)cc1",
    "c1cccc(C(F)(F)F)c1",
    "c1ccncc1",
    "c1cccnc1",
    "c1cccs1",
    "c1ccco1",
    "c1ccc(N(C)C)cc1",
)
CHAINS = (
    "C",
    "CC",
    "CCC",
    "C(C)C",
    "CCOC",
    "CC(=O)OC",
    "Cc1ccccc1",
    "Cc1ccc(F)cc1",
    "CCc1ccccc1",
    "C1CCCCC1",
    "C1CCOCC1",
    "CC1CC1",
)
# Of a ring {a} and another group {b}; {a_b} is the ring with another ring on it.
AMIDE = "OC(=O){a}.N{b}>>O=C(N{b}){a}"
ESTER = "OC(=O){a}.O{b}>>O=C(O{b}){a}"
SULFONAMIDE = "ClS(=O)(=O){a}.N{b}>>O=S(=O)(N{b}){a}"
AMINATION = "O=C{a}.N{b}>>C(N{b}){a}"
ARYLATION = "Br{a}.N{b}>>N({b}){a}"
ALKYLATION = "O{a}.Br{b}>>O({b}){a}"
COUPLING = "Br{a}.OB(O){b}>>{a_b}"
REDUCTION = "O=[N+]([O-]){a_b}>>N{a_b}"
WITH_CHAINS = (AMIDE, ESTER, SULFONAMIDE, AMINATION, ARYLATION, ALKYLATION)
TOKEN = r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|."


def joined(ring: str, other: str) -> str:
    """Return a ring with another one at its first atom.

    >>> joined("c1ccccc1", "c1ccco1")
    'c1(-c2ccco2)ccccc1'
    """
    return f"{ring[:2]}(-{other.replace('1', '2')}){ring[2:]}"


def substituted(ring: str, other: str) -> str:
    """Return a ring bound at its first atom, with another one at the next.

    >>> substituted("c1ccccc1", "c1ccco1")
    'c1c(-c2ccco2)cccc1'
    """
    return f"{ring[:3]}(-{other.replace('1', '2')}){ring[3:]}"


def reactions(count: int, seed: int = 0) -> list[str]:
    """Draw different reactions of all kinds and groups at random."""
    found = [kind.format(a=a, b=b) for kind in WITH_CHAINS for a, b in product(RINGS, CHAINS)]
    for a, b in product(RINGS, RINGS):
        found += [COUPLING.format(a=a, b=b, a_b=joined(a, b)), REDUCTION.format(a_b=substituted(a, b))]
    return random.Random(seed).sample(found, count)


def smiles_tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of SMILES by atoms, bonds and brackets, for a vocabulary in BERT's order."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    ends = [(token, vocabulary.index(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)
