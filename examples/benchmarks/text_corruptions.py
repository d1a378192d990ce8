"""Text corruptions: typing errors, case, truncation and other languages, as pure functions of texts and a seed.

- `typos`: a share of the words has two neighbouring letters exchanged, or a letter doubled or missing.
- `case`: a share of the words is in capitals. The tokenizer of an uncased model undoes this.
- `truncation`: only the first words stay.
- `german`: a share of the words that a dictionary of common words has is German, word by word; the others stay.
- `cyrillic`: a share of the words is in Cyrillic letters, letter by letter: no language, but no English either.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Corruption = Callable[[list[str], int, random.Random], list[str]]
"""Maps the words of a text, a severity from 0 to 4 and a random generator to words."""

SHARES = (0.1, 0.2, 0.35, 0.5, 0.8)
KEPT = (0.8, 0.6, 0.45, 0.3, 0.15)
FEWEST = 2
WORDS = """
    the:die a:ein an:ein and:und or:oder but:aber of:von in:in on:auf at:bei to:zu for:für with:mit from:aus by:durch
    is:ist are:sind was:war were:waren be:sein been:gewesen am:bin do:tun does:tut did:tat has:hat have:haben had:hatte
    i:ich you:du he:er she:sie it:es we:wir they:sie me:mich him:ihn her:ihr us:uns them:ihnen my:mein your:dein
    his:sein its:sein our:unser their:ihr this:dies that:das these:diese those:jene who:wer what:was which:welche
    when:wann where:wo why:warum how:wie not:nicht no:kein yes:ja all:alle some:einige any:irgendein many:viele
    more:mehr most:meist much:viel few:wenige less:weniger very:sehr too:auch so:so as:als than:als if:wenn then:dann
    there:da here:hier now:jetzt can:kann could:könnte will:wird would:würde should:sollte may:darf might:könnte
    must:muss get:bekommen got:bekam go:gehen went:ging come:kommen make:machen made:gemacht take:nehmen give:geben
    see:sehen know:wissen think:denken want:wollen need:brauchen use:benutzen find:finden play:spielen put:stellen
    add:hinzufügen help:helfen tell:sagen say:sagen said:sagte ask:fragen call:rufen show:zeigen work:arbeiten
    man:Mann woman:Frau people:Leute child:Kind boy:Junge girl:Mädchen dog:Hund water:Wasser day:Tag year:Jahr
    time:Zeit week:Woche today:heute tomorrow:morgen night:Nacht money:Geld card:Karte account:Konto bank:Bank
    new:neu old:alt good:gut bad:schlecht great:großartig best:beste first:erste last:letzte long:lang high:hoch
    small:klein big:groß one:ein two:zwei three:drei four:vier five:fünf world:Welt city:Stadt country:Land
    film:Film movie:Film story:Geschichte book:Buch music:Musik song:Lied game:Spiel patient:Patient
    patients:Patienten disease:Krankheit study:Studie treatment:Behandlung blood:Blut heart:Herz cell:Zelle
    up:auf down:ab out:aus over:über under:unter after:nach before:vor between:zwischen into:in about:über because:weil
    while:während through:durch only:nur also:auch just:nur even:sogar still:noch again:wieder never:nie always:immer
    """
GERMAN = dict(pair.split(":") for pair in WORDS.split())
CYRILLIC = dict(zip("abcdefghijklmnopqrstuvwxyz", "абцдефгхижклмнопкрстувшкиз", strict=True))


def corrupt_texts(texts: Sequence[str], kind: str, severity: int, seed: int) -> list[str]:
    """Corrupt texts by one of `KINDS` with a severity from 1 to 5.

    >>> corrupt_texts(["where is the dog now ?"], "truncation", 3, 0), corrupt_texts(["the dog"], "german", 5, 1)
    (['where is the'], ['the Hund'])
    """
    if kind not in KINDS:
        raise ValueError(f"There is no corruption {kind!r}; there are {', '.join(KINDS)}.")
    if severity not in range(1, 6):
        raise ValueError(f"The severity of a corruption must be from 1 to 5, not {severity!r}.")
    # Each text has its own generator, so that its corruption does not depend on the number of texts.
    draws = [random.Random(f"{seed} {row}") for row in range(len(texts))]
    return [" ".join(KINDS[kind](text.split(), severity - 1, draw)) for text, draw in zip(texts, draws, strict=True)]


def _some(change: Callable[[str, random.Random], str]) -> Corruption:
    """Return the corruption that changes a share of the words."""

    def corruption(words: list[str], severity: int, draw: random.Random) -> list[str]:
        # Draw for every word, so that a higher severity is more of the same.
        drawn = [(draw.random() < SHARES[severity], random.Random(draw.random())) for _ in words]
        return [change(word, own) if chosen else word for word, (chosen, own) in zip(words, drawn, strict=True)]

    return corruption


def mistyped(word: str, draw: random.Random) -> str:
    """Exchange two letters, or double or leave out one; words of one letter stay."""
    if len(word) < 2:
        return word
    place = draw.randrange(len(word) - 1)
    kind = draw.randrange(3)
    if kind == 0:
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    return word[:place] + (2 * word[place] if kind == 1 else "") + word[place + 1 :]


def truncation(words: list[str], severity: int, draw: random.Random) -> list[str]:
    """Keep a share of the words, from the first, and at least two."""
    return words[: max(FEWEST, round(KEPT[severity] * len(words)))]


KINDS: dict[str, Corruption] = {
    "typos": _some(mistyped),
    "case": _some(lambda word, draw: word.upper()),
    "truncation": truncation,
    "german": _some(lambda word, draw: GERMAN.get(word.lower(), word)),
    "cyrillic": _some(lambda word, draw: "".join(CYRILLIC.get(letter, letter) for letter in word.lower())),
}
