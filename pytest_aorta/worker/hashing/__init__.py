"""The weight hash: 128 bits of a model's logical tensors, from local shards and without a gather of weights.

**A tensor's sums.** A tensor's elements are taken in row-major order. Each has ``b`` = 8, 16 or 32 bits; an element of
8 bytes counts as two, the low half first. Each element is mixed on its own. The mixed elements are packed into 32-bit
words, ``32 / b`` to a word, the first element in the lowest bits. A tensor has two sums, of the lanes ``l`` = 0 and 1.
Word ``w``, read as signed, at index ``i`` adds to the sum of lane ``l``, modulo 2**64::

    row(l, i // 1024) * column(l, i % 1024) * w

The mix is a bijection of ``b`` bits that maps 0 to 0: the first round of Wellons' lowbias32 and of his hash16
("Prospecting for hash functions", 2018), and a mix of the same form for bytes. ``row`` is an odd signed 32-bit key,
lowbias32 of ``2 * (i // 1024) + l`` modulo 2**32, so that rows 2**31 apart (2**41 words) have the same key.
``column`` is an odd 64-bit key from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

**Layouts.** A sum does not depend on which rank holds which element, so every sharding of the same values has the same
hash. If a word is split between ranks, the terms of its parts add up to the word's term.

**Collisions.** The sum is a bilinear form of the keys, a universal hash after Carter and Wegman (1979): if the keys
were random, two given tensors that differ would share a lane's sum with probability 2**-26 at most. One changed element
always changes both lanes: its word changes, and its product with two odd keys is not zero.

**The digest.** The hash of a tensor is BLAKE2b's digest of its name, dtype, shape and sums; the hash of a model is the
digest of its tensors' hashes, sorted by name.
"""
