"""Collectives of few bits per number, with error feedback.

| file | what it does |
|---|---|
| codec.py, names.py | the base class of codecs; codecs by name |
| floats.py, eight_bit.py, one_bit.py, topk.py | fp32 and bf16; int8, fp8 and int4; signs; the
largest numbers |
| power_sgd | matrices as products of two thin ones |
| compressed, compressed_shots.py | the collectives that send payloads of a codec |
| error_feedback.py, refusal.py | what compression left out, added the next time; what is refused |
"""
