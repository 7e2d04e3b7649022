from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covering import CHARACTERS
from fedshot.data.sources.tokenizer import tokenize


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", ""),
        (" \t\r\n\u00a0", ""),
        ("I don't; can't, WON'T", "i do n't ; ca n't , wo n't"),
        ("It's we've you'll they're I'm he'd", "it 's we 've you 'll they 're i 'm he 'd"),
        ("it\u2019s don\u2019t", "it 's do n't"),
        ("the dogs' 'quoted' o'clock", "the dogs ' ' quoted ' o ' clock"),
        ("n'ts 'seven", "n ' ts ' seven"),
        ("see https://a.b/c?d=e, or www.a.b.", "see <url> or <url>"),
        ("www. is no address", "www . is no address"),
        ("mail Me.You@a-b.org!", "mail <email> !"),
        ("@Some_One said #hi", "<user> said # hi"),
        ("a @ b", "a @ b"),
        ("$1,000.50 at 10:30, 24/7, 50%", "$ 1,000.50 at 10:30 , 24/7 , 50 %"),
        ("mp3 2nd 10.5kg 3.", "mp3 2nd 10 . 5kg 3 ."),
        ("the U.S. and e.g. this", "the u.s. and e.g. this"),
        ("well-known a_b __x", "well - known a _ b _ x"),
        ("wait... no.... ---- end--ing", "wait ... no ... -- end -- ing"),
        ("stop!!! ***", "stop ! *"),
        ("?!?!", "? ! ? !"),
        ("naïve NAI\u0308VE İ", "naïve naïve i\u0307"),
        ("İstanbul x\u0302's", "i\u0307stanbul x\u0302 's"),
        ("हिन्दी में, தமிழ் \u0301", "हिन्दी में , தமிழ் \u0301"),
        ("க\u200cஷ \u200cx\u200d", "க\u200cஷ x"),
        ("1\ufe0f\u20e3 @नमस्ते", "1 \u20e3 <user>"),
        ("❤\ufe0f 👨\u200d👩 :)", "❤ 👨 👩 : )"),
        ("a\x00b\x85c\u200bd\ufeff", "a b c d"),
        ("привет 一二三 ٣", "привет 一二三 ٣"),
        ("\ud800x", "\ud800 x"),
    ],
)
def test_tokens_are_cut_as_the_table_says(text, tokens):
    assert tokenize(text) == tokens.split()


@given(st.text(CHARACTERS))
def test_tokens_have_no_blanks_and_the_same_text_gives_the_same_tokens(text):
    tokens = tokenize(text)
    assert all(token and not any(c.isspace() for c in token) for token in tokens)
    assert tokens == tokenize(text)


@given(st.lists(st.sampled_from(["a", "1", ".", "'", "n't", "@", "-", "http://", " ", "é", "_"])))
def test_every_letter_and_digit_ends_up_in_a_token(parts):
    text = "".join(parts)
    if "@" not in text and "http" not in text:
        want = [c for c in text if c.isalnum()]
        assert [c for token in tokenize(text) for c in token if c.isalnum()] == want


def test_no_text_takes_more_than_a_moment():
    """A pattern that tries each pair of places would not end."""
    for piece in ("a.", "1.", "a", "n't", "'s", "@", "-a", "a.b-", "www.", "1a", "_"):
        for end in ("", "@"):
            assert tokenize(piece * (50_000 // len(piece)) + end)
