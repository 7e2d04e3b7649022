"""Text to tokens, in one stated way, close to how the words of GloVe 6B were cut.

The text is lower-cased and composed (NFC, curly apostrophes straightened). Then, from left to
right, the first of these that fits is a token:

| token | examples |
|---|---|
| a web address becomes `<url>` | `https://a.b/c`, `www.a.b` |
| a mail address becomes `<email>` | `me@a.org` |
| a mention becomes `<user>` | `@me` |
| the end of a contraction | `n't`, `'s`, `'re`, `'ve`, `'ll`, `'d`, `'m`: "don't" is `do n't` |
| initials with their dots | `u.s.`, `e.g.` |
| a number with its inner marks | `1,000.5`, `10:30`, `24/7` |
| a run of letters and digits | `mp3`, `2nd`, `café` |
| two or more dots, two or more dashes | `...`, `--`, however many there were |
| a run of one other mark, once | `!` for `!!!`, `-`, `$` |

What cannot be seen (control marks, joiners, variation selectors) is passed over, so an emoji made
of several is several tokens. Words of a language written without spaces stay together.
"""

from __future__ import annotations

import re
import unicodedata

URL, EMAIL, USER = "<url>", "<email>", "<user>"

_SPECIAL = {"url": URL, "email": EMAIL, "user": USER, "dots": "...", "dashes": "--"}
_NEGATION = re.compile(r"(?<=[^\W_])(?=n't(?![^\W_]))")
_STRAIGHT = str.maketrans({"\u2019": "'", "\u02bc": "'", "`": "'"})

# Possessive repeats (`++`): no text can make the search go back and forth.
_TOKEN = re.compile(
    r"""
      (?P<url> https?://\S++ | www\.[^\W_]\S*+ )
    | (?P<email> [\w.+-]{1,64}+@[\w-]{1,63}+(?:\.[\w-]{1,63}+)++ )
    | (?P<user> @\w++ )
    | (?P<word>
          (?: (?<=\ )n't | (?<=[^\W_])'(?:s|re|ve|ll|d|m) )(?![^\W_])
        | (?<![^\W_])(?:[^\W\d_]\.){2,}+
        | \d++(?:[.,:/]\d++)*+(?![^\W_])
        | [^\W_]++
      )
    | (?P<dots> \.{2,}+ )
    | (?P<dashes> -{2,}+ )
    | (?P<mark> [^\w\s\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060\ufe00-\ufe0f\ufeff]|_)
      (?P=mark)*+
    """,
    re.VERBOSE,
)


def tokenize(text: str) -> list[str]:
    """Return the tokens of a text.

    >>> tokenize("I don't know: see http://a.org, @me... It's 10:30!!!")
    ['i', 'do', "n't", 'know', ':', 'see', '<url>', '<user>', '...', 'it', "'s", '10:30', '!']
    """
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    text = text.translate(_STRAIGHT)
    if "n't" in text:
        text = _NEGATION.sub(" ", text)
    tokens = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        assert kind is not None
        tokens.append(_SPECIAL.get(kind) or match[kind])
    return tokens
