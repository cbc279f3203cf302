// What the input pipeline does to each sample, with results that equal those of NumPy:
// the permutation that hvdtrain/data/index_shuffle.py describes, and copies of rows.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// Samples that are permuted at a time: each operation waits for the one before, and a
// processor has several in flight.
constexpr int kLanes = 8;
// How many rows ahead of the copies rows are prefetched, and the bytes of each. Rows of
// an array that is larger than the caches come from memory.
constexpr int64_t kAheadRows = 2;
constexpr size_t kPrefetchedBytes = 4096;
constexpr size_t kLineBytes = 64;

struct Permutation {
  uint64_t rows, columns;
  const uint64_t* keys;
  int64_t num_keys;
};

// value + hash(other), modulo size.
uint64_t Add(uint64_t value, uint64_t other, uint64_t key, uint64_t size) {
  uint64_t hashed = (other + key) * 0xBF58476D1CE4E5B9u;
  hashed ^= hashed >> 32;
  hashed *= 0x94D049BB133111EBu;
  // The upper half, scaled to 0 to size - 1.
  const uint64_t sum = value + ((hashed >> 32) * size >> 32);
  // Unsigned: where sum is less than size, the difference is the greater one.
  return std::min(sum, sum - size);
}

template <int kCells>
void Permute(const Permutation& by, uint64_t* cells) {
  uint64_t rows[kCells], columns[kCells];
  for (int i = 0; i < kCells; ++i) {
    rows[i] = cells[i] / by.columns;
    columns[i] = cells[i] % by.columns;
  }
  for (int64_t key = 0; key < by.num_keys; key += 2) {
    for (int i = 0; i < kCells; ++i) {
      rows[i] = Add(rows[i], columns[i], by.keys[key], by.rows);
      columns[i] = Add(columns[i], rows[i], by.keys[key + 1], by.columns);
    }
  }
  for (int i = 0; i < kCells; ++i) cells[i] = rows[i] * by.columns + columns[i];
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT void hvdtrain_index_shuffle(uint64_t* indices, int64_t count, uint64_t num_samples,
                                   uint64_t rows, uint64_t columns, const uint64_t* keys,
                                   int64_t num_keys) {
  const Permutation permutation{rows, columns, keys, num_keys};
  int64_t done = 0;
  for (; done + kLanes <= count; done += kLanes) {
    Permute<kLanes>(permutation, indices + done);
  }
  for (; done < count; ++done) Permute<1>(permutation, indices + done);
  for (int64_t i = 0; i < count; ++i) {
    while (indices[i] >= num_samples) Permute<1>(permutation, indices + i);
  }
}

// Copies rows of `row_bytes`, by their numbers, one after the other. Returns -1, or the
// place of the first number that is not of one of `num_rows` rows; nothing is copied then.
EXPORT int64_t hvdtrain_take_rows(const char* array, int64_t num_rows, size_t row_bytes,
                                  const int64_t* numbers, int64_t count, char* taken) {
  const auto bad = std::find_if(numbers, numbers + count, [&](int64_t number) {
    return number < 0 || number >= num_rows;
  });
  if (bad != numbers + count) return bad - numbers;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAheadRows < count) {
      const char* const ahead = array + numbers[i + kAheadRows] * row_bytes;
      const size_t bytes = std::min(row_bytes, kPrefetchedBytes);
      for (size_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(ahead + i);
    }
    memcpy(taken + i * row_bytes, array + numbers[i] * row_bytes, row_bytes);
  }
  return -1;
}

}  // extern "C"
