"""Permutation: the numbers 0 to n - 1 in a random order that is computed, not stored.

    position -> (left, right)          position = left * b + right, with a * b >= n
                left  += F1(right)     mod a
                right += F2(left)      mod b       ... 8 rounds
    number   <- left * b + right       again from there while it is n or more (cycle walking)

Each round can be undone, so all rounds together are a permutation of 0 ... a * b - 1, and walking
on from what lies outside makes one of 0 ... n - 1 (Black and Rogaway, Ciphers with Arbitrary Finite
Domains, 2002). With a = ceil(sqrt(n)) fewer than a numbers lie outside, so hardly any walk is
needed. An order takes the same few bytes for 10 and for 10^12 numbers, and any position of it is
found without those before it.
"""

from __future__ import annotations

import math
import operator

import numpy as np

from pyops.random import key_of

__all__ = ["Permutation"]

ROUNDS = 8
MOST = 1 << 62  # left * b + right stays within 64 bits
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Permutation:
    """A permutation of 0 to n - 1, a function of (n, seed, name) alone, the same on any machine.

    Args:
        n: How many numbers; 1 to 2^62.
        seed: Of the order.
        name: Of the stream under the seed, as in `pyops.random.key_of`.

    Raises:
        ValueError: When n is out of its range.
    """

    def __init__(self, n: int, *, seed: int, name: str) -> None:
        if not 1 <= n <= MOST:
            raise ValueError(f"n is {n}; a permutation has 1 to {MOST} (2^62) numbers")
        self.n = operator.index(n)
        root = math.isqrt(n - 1) + 1
        self._a, self._b = np.uint64(root), np.uint64(-(-n // root))
        self._keys = [np.uint64(key_of(seed, f"{name}/{i}")) for i in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        return int(self(np.array([position]))[0])

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The numbers at these positions.

        Args:
            positions: Whole numbers from 0 to n - 1, of any shape.

        Returns:
            int64, of the same shape.

        Raises:
            IndexError: When a position is out of range.
        """
        return self._walk(positions, inverse=False)

    def positions_of(self, numbers: np.ndarray) -> np.ndarray:
        """Where these numbers stand: the inverse of the call.

        Args:
            numbers: Whole numbers from 0 to n - 1, of any shape.

        Returns:
            int64, of the same shape.
        """
        return self._walk(numbers, inverse=True)

    def _walk(self, places: np.ndarray, *, inverse: bool) -> np.ndarray:
        given = np.asarray(places)
        if given.size and not (given.min() >= 0 and given.max() < self.n):
            raise IndexError(f"there are positions 0 to {self.n - 1}, not all of {given}")
        found = self._rounds(given.astype(np.uint64).reshape(-1), inverse=inverse)
        while (outside := np.flatnonzero(found >= np.uint64(self.n))).size:
            found[outside] = self._rounds(found[outside], inverse=inverse)
        return found.astype(np.int64).reshape(given.shape)

    def _rounds(self, places: np.ndarray, *, inverse: bool) -> np.ndarray:
        a, b = self._a, self._b
        left, right = places // b, places % b
        order = range(ROUNDS)
        for i in reversed(order) if inverse else order:
            if i % 2:
                shift = _mixed(left, self._keys[i]) % b
                right = (right + (b - shift if inverse else shift)) % b
            else:
                shift = _mixed(right, self._keys[i]) % a
                left = (left + (a - shift if inverse else shift)) % a
        found: np.ndarray = left * b + right
        return found


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """64 bits that depend on all of a value and the key: the finalizer of SplitMix64 (Steele et
    al., 2014)."""
    x = (values + np.uint64(1)) * _STEP ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
