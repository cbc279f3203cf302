// The permutation that hvdtrain/data/index_shuffle.py describes, with equal results.

#include <algorithm>
#include <cstdint>

namespace {

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

}  // namespace

extern "C" __attribute__((visibility("default"))) void hvdtrain_index_shuffle(
    uint64_t* indices, int64_t count, uint64_t num_samples, uint64_t rows,
    uint64_t columns, const uint64_t* keys, int64_t num_keys) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t cell = indices[i];
    do {
      uint64_t row = cell / columns, column = cell % columns;
      for (int64_t key = 0; key < num_keys; key += 2) {
        row = Add(row, column, keys[key], rows);
        column = Add(column, row, keys[key + 1], columns);
      }
      cell = row * columns + column;
    } while (cell >= num_samples);
    indices[i] = cell;
  }
}
