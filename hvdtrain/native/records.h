// The checksums of TFRecord files.

#ifndef HVDTRAIN_RECORDS_H_
#define HVDTRAIN_RECORDS_H_

#include <cstdint>

namespace hvdtrain {

// Returns the number of the first record whose length is not the expected one, or whose
// length or data has another checksum; -1 if there is none. Of a record, the 12 bytes
// of its header and, if the length is the expected one, `length + 4` bytes are read.
int64_t FirstBadRecord(const uint8_t* base, const int64_t* offsets,
                       const int64_t* lengths, int64_t count);

}  // namespace hvdtrain

#endif  // HVDTRAIN_RECORDS_H_
