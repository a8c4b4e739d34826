"""The weight hash: 128 bits of a model's logical tensors, from local shards and without a gather of weights.

**A tensor's sums.** A tensor's elements, row-major and each of ``b`` = 8, 16 or 32 bits (elements of 8 bytes count as
two, the low one first), are mixed one by one and then packed into 32-bit words, ``32 / b`` to a word, the first lowest.
Word ``w``, read as signed, at index ``i`` adds, in lane ``l``, modulo 2**64::

    row(l, i // 1024) * column(l, i % 1024) * w

The mix is a bijection of ``b`` bits that maps 0 to 0: the first round of Wellons' lowbias32 and of his hash16
("Prospecting for hash functions", 2018), and a mix of the same form for bytes. ``row`` is an odd signed 32-bit key,
lowbias32 of ``2 * (i // 1024) + l`` modulo 2**32, so that rows 2**31 apart, which is 2**41 words, share a key.
``column`` is an odd 64-bit key from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

**Layouts.** A sum does not depend on which rank holds which element, so every sharding of the same values has the same
hash. A word split between ranks adds the sum of what its parts add.

**Collisions.** The sum is a bilinear form of the keys, a universal hash after Carter and Wegman (1979): if the keys
were random, two given tensors that differ would share a lane's sum with probability 2**-26 at most. One changed element
always changes both lanes, since no factor of its word's change can be zero.

**The digest.** The hash of a tensor is BLAKE2b's digest of its name, dtype, shape and sums; the hash of a model is the
digest of its tensors' hashes, sorted by name.
"""
