// CRC-32C (Castagnoli), masked as in TFRecord files, by the instruction of SSE 4.2 where
// the processor has it. A record is its length (8 bytes), the checksum of the length
// (4), the data, and the checksum of the data (4), all little-endian.

#include "records.h"

#include <array>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace hvdtrain {
namespace {

constexpr int kHeaderBytes = 12;

using Crc = uint32_t (*)(const uint8_t* data, size_t size);

template <typename Number>
Number Load(const uint8_t* data) {
  Number number;
  std::memcpy(&number, data, sizeof(number));
  return number;
}

std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    table[byte] = crc;
  }
  return table;
}

uint32_t TableCrc(const uint8_t* data, size_t size) {
  static const std::array<uint32_t, 256> table = MakeTable();
  uint32_t crc = ~0u;
  for (; size > 0; --size) crc = crc >> 8 ^ table[(crc ^ *data++) & 0xFF];
  return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t InstructionCrc(const uint8_t* data,
                                                         size_t size) {
  uint64_t crc = ~0u;
  for (; size >= 8; size -= 8, data += 8) crc = _mm_crc32_u64(crc, Load<uint64_t>(data));
  uint32_t rest = static_cast<uint32_t>(crc);
  for (; size > 0; --size) rest = _mm_crc32_u8(rest, *data++);
  return ~rest;
}
#endif

Crc FastestCrc() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return InstructionCrc;
#endif
  return TableCrc;
}

// Files contain masked checksums: the checksum of data that contains checksums would
// be weak.
uint32_t Masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8u; }

bool IsGood(Crc crc, const uint8_t* record, uint64_t length) {
  const uint8_t* data = record + kHeaderBytes;
  return Load<uint64_t>(record) == length &&
         Load<uint32_t>(record + 8) == Masked(crc(record, 8)) &&
         Load<uint32_t>(data + length) == Masked(crc(data, length));
}

}  // namespace

int64_t FirstBadRecord(const uint8_t* base, const int64_t* offsets,
                       const int64_t* lengths, int64_t count) {
  static const Crc crc = FastestCrc();
  for (int64_t i = 0; i < count; ++i) {
    if (!IsGood(crc, base + offsets[i], lengths[i])) return i;
  }
  return -1;
}

}  // namespace hvdtrain
