#!/usr/bin/env python3
"""Writes golden.txt: what Hugging Face `tokenizers` does with a few texts and id sequences.

  make_golden.py NAME=tokenizer.json... > golden.txt

Lines are tab-separated: "@ name" starts a tokenizer, "E text ids" is an encoding, "D ids text" a
decoding (ids of random tokens, so mostly invalid bytes). Texts are escaped: \\n \\r \\t \\\\ \\u{hex}.
"""
import random
import sys
import unicodedata

from tokenizers import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. It's 5 o'clock; we'll see, they'd said, I'M, YOU'RE.",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];  // dot product\n}\r\n\r\n",
    "def f(x):\n    if x is None:\n        return {}\n    return {'a': [1, 2.5e-10], \"b\": x ** 2}\n",
    "#include <vector>\nstd::vector<std::pair<int, int>> v{{1, 2}};",
    "SELECT * FROM t WHERE a_b >= 100 AND c != 'x' -- comment",
    "0 1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x1F 2024-01-31 ½ ² Ⅷ ١٢٣",
    "a  b   c    d     e\t\tf\t \tg \n h\n\n\ni \n\n j   \n   k\r\n\r\nl",
    "   leading and trailing   ",
    "\n\n\n   \n",
    "tabs\tand\u00a0no-break\u3000ideographic\u2028line\u0085next\u180emongolian\u200bzero",
    "漢字とひらがなとカタカナ。中文分词测试,简体繁體混排!한국어 문장입니다.",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते สวัสดีชาวโลก",
    "emoji 😀👍🏽 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪🇯🇵 end",
    "e\u0301 é A\u030a Å \u212b q\u0307\u0323 \u1100\u1161\u11a8 각 \ufb01 \u0344 \u0958",
    "Zalgo: Z\u0351\u036b\u0343a\u0300\u0301\u0302l\u0334g\u0335o\u0336",
    "'s'T're'VE'm'Ll'd '\u017f it''s ''",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|endoftext|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|end_of_text|>",
    "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>ok</think>Hello<｜end▁of▁sentence｜>",
    "<|im_start <|im_start|> <|im_start|>><<|im_end|> <tool_call>{}</tool_call> <｜tool▁sep｜>",
    "control \u0000\u0001\u0007\u001b[0m\u007f \ufeffbom \ufffd \uffff \U0010ffff",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\path\\to\\file",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "!!!???...---===***___~~~```$$$ @#%^&+ «quotes» “curly” — dash … ellipsis €£¥",
    "mixedCASEandCamelCaseAndsnake_case_with123numbers456",
]


def escape(text):
    out = []
    for c in text:
        if c in "\n\r\t\\":
            out.append({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}[c])
        elif c != " " and unicodedata.category(c)[0] in "CMZ":
            out.append("\\u{%x}" % ord(c))
        else:
            out.append(c)
    return "".join(out)


def main():
    for argument in sys.argv[1:]:
        name, path = argument.split("=", 1)
        tokenizer = Tokenizer.from_file(path)
        print("@", name, sep="\t")
        for text in TEXTS:
            ids = tokenizer.encode(text).ids
            print("E", escape(text), " ".join(map(str, ids)), sep="\t")
        rng = random.Random(1)
        ids = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(i) is not None]
        for _ in range(40):
            pick = [rng.choice(ids if rng.random() < 0.5 else ids[:400]) for _ in range(rng.randint(1, 10))]
            text = tokenizer.decode(pick, skip_special_tokens=False)
            print("D", " ".join(map(str, pick)), escape(text), sep="\t")


if __name__ == "__main__":
    main()
