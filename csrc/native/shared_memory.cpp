// Collectives among the ranks of one host over shared memory: pybind11 class SharedMemoryRing.
//
//     chunk k goes through slot k % SLOTS, and three chunks are on their way at once:
//
//       copy in  k      the parts that other ranks own: user memory -> my slot
//       sum      k - 1  the part that I own, from all slots in rank order: -> user memory and my
//                       result slot
//       copy out k - 2  the parts that other ranks own: their result slots -> user memory
//
// Slots stay in the cache; user memory is read once and written once. The sum has the order of the
// ranks, whatever the chunk, so it equals sum_rows of the ranks' tensors bit for bit. A small
// message takes one round: everything into the slots, and each rank sums all of it. The first chunk
// carries a signature, so that ranks that disagree all end with MISMATCH.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../cpu/kernels.h"
#include "shared_region.h"

namespace py = pybind11;

namespace pyops {
namespace {

constexpr int64_t SLOTS = 4;
// Bytes summed at a time: a result that is copied on is still in the first cache
constexpr int64_t BLOCK = 8192;
// Elements; parts begin at multiples of it, so no cache line has two writers
constexpr int64_t LINE = 64;

// Dtype codes of math/optimizers/table.h go to the kernels; the others stand for the sum of
// integers of that width, or of booleans.
enum Dtype {
    FP32 = 0,
    BF16 = 1,
    FP16 = 2,
    FP64 = 3,
    INT8 = 4,
    INT16 = 5,
    INT32 = 6,
    INT64 = 7,
    BOOL = 8,
    NUM_DTYPES = 9
};
constexpr int64_t ITEM_SIZE[NUM_DTYPES] = {4, 2, 2, 8, 1, 2, 4, 8, 1};

template <typename T>
void add_rows(void* out, const void* const* rows, int num_rows, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        // Unsigned: overflow wraps, as it does in torch
        T total = static_cast<const T*>(rows[0])[i];
        for (int r = 1; r < num_rows; ++r)
            total = static_cast<T>(total + static_cast<const T*>(rows[r])[i]);
        static_cast<T*>(out)[i] = total;
    }
}

void sum_rows(void* out, const void* const* rows, int num_rows, int64_t n, int dtype,
              double scale) {
    switch (dtype) {
        case INT8: return add_rows<uint8_t>(out, rows, num_rows, n);
        case INT16: return add_rows<uint16_t>(out, rows, num_rows, n);
        case INT32: return add_rows<uint32_t>(out, rows, num_rows, n);
        case INT64: return add_rows<uint64_t>(out, rows, num_rows, n);
        case BOOL:
            for (int64_t i = 0; i < n; ++i) {
                uint8_t any = 0;
                for (int r = 0; r < num_rows; ++r) any |= static_cast<const uint8_t*>(rows[r])[i];
                static_cast<uint8_t*>(out)[i] = any;
            }
            return;
        default: kernels().sum_rows(out, rows, num_rows, n, dtype, dtype, scale);
    }
}

class SharedMemoryRing {
public:
    SharedMemoryRing(const std::string& name, int rank, int size, bool create, int64_t chunk_bytes,
                     int64_t small_bytes)
        : chunk_(chunk_bytes), small_(small_bytes), size_(size), rank_(rank) {
        if (chunk_bytes < LINE * 8 * size || chunk_bytes % 4096 || small_bytes < 0 ||
            small_bytes % 4096)
            throw std::invalid_argument(
                "chunk_bytes and small_bytes must be multiples of 4096, and a chunk at least " +
                std::to_string(LINE * 8 * size) + " bytes for " + std::to_string(size) + " ranks");
        const size_t bytes =
            static_cast<size_t>(size) * (2 * small_bytes + 2 * SLOTS * chunk_bytes);
        region_ = std::make_unique<Region>(name, rank, size, create, bytes);
    }

    void unlink() { region_->unlink(); }

    // In place, `n` elements at `data`: the sum over ranks, times scale.
    int all_reduce(uintptr_t data, int64_t n, int dtype, double scale, uint64_t tag, int spins,
                   double timeout) {
        check(dtype, n);
        return run(spins, timeout, {tag * 16 + 1, uint64_t(n), uint64_t(dtype), bits(scale)}, [&] {
            char* user = reinterpret_cast<char*>(data);
            return n * ITEM_SIZE[dtype] <= small_ ? reduce_small(user, n, dtype, scale)
                                                  : reduce_large(user, n, dtype, scale);
        });
    }

    // `starts` has size + 1 numbers: part p of the input is [starts[p], starts[p + 1]); mine,
    // summed and scaled, goes to `out`.
    int reduce_scatter(uintptr_t in, uintptr_t out, const std::vector<int64_t>& starts, int dtype,
                       double scale, uint64_t tag, int spins, double timeout) {
        check(dtype, 0);
        check(starts);
        return run(spins, timeout, {tag * 16 + 2, digest(starts), uint64_t(dtype), bits(scale)},
                   [&] {
                       return scatter(reinterpret_cast<const char*>(in),
                                      reinterpret_cast<char*>(out), starts, dtype, scale);
                   });
    }

    // Bytes: my part goes to [starts[rank], starts[rank + 1]) of every rank's `out`.
    int all_gather(uintptr_t in, uintptr_t out, const std::vector<int64_t>& starts, uint64_t tag,
                   int spins, double timeout) {
        check(starts);
        return run(spins, timeout, {tag * 16 + 3, digest(starts), 0, 0}, [&] {
            return gather(reinterpret_cast<const char*>(in), reinterpret_cast<char*>(out), starts);
        });
    }

    // What `peer` called in the latest collective, for messages: kind, size or digest of sizes,
    // dtype, bits of the scale, tag.
    py::tuple signature(int peer) {
        if (peer < 0 || peer >= size_ || sequence_ == 0)
            throw std::invalid_argument("no such rank, or no collective yet");
        const uint64_t* words = region_->control(peer).signatures[(sequence_ - 1) % 2];
        return py::make_tuple(words[0] % 16, words[1], words[2], words[3], words[0] / 16);
    }

private:
    static uint64_t bits(double x) {
        uint64_t word;
        std::memcpy(&word, &x, sizeof word);
        return word;
    }
    static uint64_t digest(const std::vector<int64_t>& numbers) {
        uint64_t hash = 1469598103934665603ull;
        for (int64_t number : numbers)
            hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211ull;
        return hash;
    }
    static void check(int dtype, int64_t n) {
        if (dtype < 0 || dtype >= NUM_DTYPES || n < 0)
            throw std::invalid_argument("dtype code " + std::to_string(dtype) + " or size " +
                                        std::to_string(n) + " out of range");
    }
    void check(const std::vector<int64_t>& starts) const {
        if (int(starts.size()) != size_ + 1 || starts[0] != 0 ||
            !std::is_sorted(starts.begin(), starts.end()))
            throw std::invalid_argument("starts must be " + std::to_string(size_ + 1) +
                                        " numbers, increasing from 0");
    }

    char* small_slot(int peer) {
        return region_->memory() + (peer * 2 + int64_t(sequence_ % 2)) * small_;
    }
    char* in_slot(int peer, int64_t k) { return slots() + (peer * SLOTS + k % SLOTS) * chunk_; }
    char* result_slot(int peer, int64_t k) {
        return slots() + ((size_ + peer) * SLOTS + k % SLOTS) * chunk_;
    }
    char* slots() { return region_->memory() + size_ * 2 * small_; }
    uint64_t base() const { return sequence_ << CHUNK_BITS; }
    // The value that a counter has when chunk k - SLOTS, whose slot chunk k takes over, is through;
    // in the first chunks, when the collective before is.
    uint64_t reusable(int64_t k) const {
        return base() + uint64_t(std::max<int64_t>(0, k - SLOTS + 1));
    }

    template <typename Body>
    int run(int spins, double timeout, const uint64_t (&signature)[SIGNATURE_WORDS],
            const Body& body) {
        py::gil_scoped_release released;
        region_->spins = spins;
        region_->yields = spins >= 64;
        region_->timeout = timeout;
        Status status = region_->failed();
        if (status.ok()) {
            std::memcpy(region_->mine().signatures[sequence_ % 2], signature, sizeof signature);
            status = body();
        }
        if (status.ok() || status.code == MISMATCH) region_->post_done(++sequence_ << CHUNK_BITS);
        return status.packed();
    }

    // The inputs of chunk k are there. With the first, every rank's signature is too, and all ranks
    // find the same difference.
    Status inputs_ready(int64_t k) {
        const Status status = region_->wait(&Control::in, base() + uint64_t(k) + 1);
        if (!status.ok() || k) return status;
        const int parity = int(sequence_ % 2);
        for (int peer = 0; peer < size_; ++peer)
            if (std::memcmp(region_->control(peer).signatures[parity],
                            region_->mine().signatures[parity], sizeof(uint64_t) * SIGNATURE_WORDS))
                return {MISMATCH, peer};
        return {};
    }

    // A peer that posts collective q has finished q - 1, so two small slots, used in turn, need no
    // further waiting.
    Status reduce_small(char* user, int64_t n, int dtype, double scale) {
        std::memcpy(small_slot(rank_), user, size_t(n * ITEM_SIZE[dtype]));
        region_->post(&Control::in, base() + 1);
        const Status status = inputs_ready(0);
        if (!status.ok()) return status;
        const void* rows[MAX_RANKS];
        for (int peer = 0; peer < size_; ++peer) rows[peer] = small_slot(peer);
        rows[rank_] = user;
        sum_rows(user, rows, size_, n, dtype, scale);
        return {};
    }

    struct Part {
        int64_t begin, n;  // elements, within the chunk
    };
    Part part_of(int64_t length, int owner) const {
        const int64_t each = ((length + size_ - 1) / size_ + LINE - 1) / LINE * LINE;
        const int64_t begin = std::min(length, owner * each);
        return {begin, std::min(length, begin + each) - begin};
    }

    // Bytes of a chunk: several for a message of medium size, so that they overlap, and few for a
    // large one, because every chunk is a rendezvous, which is dear when there are more threads
    // than processors.
    int64_t step_for(int64_t nbytes) const {
        const int64_t eighth = (nbytes / 8 + 4095) / 4096 * 4096;
        return std::min(chunk_, std::max<int64_t>(eighth, 64 << 10));
    }

    Status reduce_large(char* user, int64_t n, int dtype, double scale) {
        const int64_t item = ITEM_SIZE[dtype], step = step_for(n * item) / item,
                      chunks = (n + step - 1) / step;
        const auto length = [&](int64_t k) { return std::min(step, n - k * step); };
        const auto others = [&](int64_t k, const auto& copy) {
            for (int i = 1; i < size_; ++i) {
                const int owner = (rank_ + i) % size_;
                const Part part = part_of(length(k), owner);
                copy(owner, part.begin * item, user + (k * step + part.begin) * item,
                     size_t(part.n * item));
            }
        };
        Status status;
        for (int64_t k = 0; k < chunks + 2; ++k) {
            if (k < chunks) {
                if (!(status = region_->wait(&Control::sum, reusable(k))).ok()) return status;
                others(k, [&](int, int64_t at, char* mine, size_t bytes) {
                    std::memcpy(in_slot(rank_, k) + at, mine, bytes);
                });
                region_->post(&Control::in, base() + uint64_t(k) + 1);
            }
            if (k >= 1 && k - 1 < chunks) {
                if (!(status = inputs_ready(k - 1)).ok()) return status;
                if (!(status = region_->wait(&Control::out, reusable(k - 1))).ok()) return status;
                sum_my_part(user + (k - 1) * step * item, k - 1, part_of(length(k - 1), rank_),
                            dtype, scale);
                region_->post(&Control::sum, base() + uint64_t(k));
            }
            if (k >= 2) {
                if (!(status = region_->wait(&Control::sum, base() + uint64_t(k) - 1)).ok())
                    return status;
                others(k - 2, [&](int owner, int64_t at, char* mine, size_t bytes) {
                    std::memcpy(mine, result_slot(owner, k - 2) + at, bytes);
                });
                region_->post(&Control::out, base() + uint64_t(k) - 1);
            }
        }
        return {};
    }

    void sum_my_part(char* user, int64_t k, Part part, int dtype, double scale) {
        const int64_t item = ITEM_SIZE[dtype], block = BLOCK / item;
        const void* rows[MAX_RANKS];
        for (int64_t i = 0; i < part.n; i += block) {
            const int64_t at = (part.begin + i) * item, count = std::min(block, part.n - i);
            for (int peer = 0; peer < size_; ++peer) rows[peer] = in_slot(peer, k) + at;
            rows[rank_] = user + at;
            sum_rows(user + at, rows, size_, count, dtype, scale);
            std::memcpy(result_slot(rank_, k) + at, user + at, size_t(count * item));
        }
    }

    Status scatter(const char* in, char* out, const std::vector<int64_t>& starts, int dtype,
                   double scale) {
        const int64_t item = ITEM_SIZE[dtype], step = chunk_ / size_ / item / LINE * LINE;
        const auto length = [&](int p, int64_t k) {
            return std::clamp<int64_t>(starts[p + 1] - starts[p] - k * step, 0, step);
        };
        const int64_t chunks = num_chunks(starts, step);
        Status status;
        for (int64_t k = 0; k < chunks + 1; ++k) {
            if (k < chunks) {
                if (!(status = region_->wait(&Control::sum, reusable(k))).ok()) return status;
                for (int p = 0; p < size_; ++p)
                    if (p != rank_)
                        std::memcpy(in_slot(rank_, k) + p * step * item,
                                    in + (starts[p] + k * step) * item,
                                    size_t(length(p, k) * item));
                region_->post(&Control::in, base() + uint64_t(k) + 1);
            }
            if (k < 1) continue;
            if (!(status = inputs_ready(k - 1)).ok()) return status;
            const void* rows[MAX_RANKS];
            for (int p = 0; p < size_; ++p) rows[p] = in_slot(p, k - 1) + rank_ * step * item;
            rows[rank_] = in + (starts[rank_] + (k - 1) * step) * item;
            sum_rows(out + (k - 1) * step * item, rows, size_, length(rank_, k - 1), dtype, scale);
            region_->post(&Control::sum, base() + uint64_t(k));
        }
        return {};
    }

    Status gather(const char* in, char* out, const std::vector<int64_t>& starts) {
        const auto length = [&](int p, int64_t k) {
            return std::clamp<int64_t>(starts[p + 1] - starts[p] - k * chunk_, 0, chunk_);
        };
        const int64_t chunks = num_chunks(starts, chunk_);
        Status status;
        for (int64_t k = 0; k < chunks + 1; ++k) {
            if (k < chunks) {
                if (!(status = region_->wait(&Control::out, reusable(k))).ok()) return status;
                std::memcpy(in_slot(rank_, k), in + k * chunk_, size_t(length(rank_, k)));
                region_->post(&Control::in, base() + uint64_t(k) + 1);
                std::memmove(out + starts[rank_] + k * chunk_, in + k * chunk_,
                             size_t(length(rank_, k)));
            }
            if (k < 1) continue;
            if (!(status = inputs_ready(k - 1)).ok()) return status;
            for (int i = 1; i < size_; ++i) {
                const int p = (rank_ + i) % size_;
                std::memcpy(out + starts[p] + (k - 1) * chunk_, in_slot(p, k - 1),
                            size_t(length(p, k - 1)));
            }
            region_->post(&Control::out, base() + uint64_t(k));
        }
        return {};
    }

    // At least one, so that ranks that disagree about an empty tensor find out.
    int64_t num_chunks(const std::vector<int64_t>& starts, int64_t step) const {
        int64_t longest = 1;
        for (int p = 0; p < size_; ++p) longest = std::max(longest, starts[p + 1] - starts[p]);
        return (longest + step - 1) / step;
    }

    const int64_t chunk_, small_;
    const int size_, rank_;
    uint64_t sequence_ = 0;
    std::unique_ptr<Region> region_;
};

}  // namespace
}  // namespace pyops

void bind_shared_memory(py::module_& m) {
    using pyops::SharedMemoryRing;
    py::class_<SharedMemoryRing>(
        m, "SharedMemoryRing",
        "One rank's end of collectives over shared memory. Pointers are integers; every method "
        "returns "
        "code + 256 * rank: 0 fine, 1 the ranks disagree, 2 the rank died, 3 the rank is late.")
        .def(py::init<const std::string&, int, int, bool, int64_t, int64_t>(), py::arg("name"),
             py::arg("rank"), py::arg("size"), py::arg("create"), py::arg("chunk_bytes") = 1 << 20,
             py::arg("small_bytes") = 32 << 10)
        .def("unlink", &SharedMemoryRing::unlink)
        .def("signature", &SharedMemoryRing::signature)
        .def("all_reduce", &SharedMemoryRing::all_reduce)
        .def("reduce_scatter", &SharedMemoryRing::reduce_scatter)
        .def("all_gather", &SharedMemoryRing::all_gather);
}
