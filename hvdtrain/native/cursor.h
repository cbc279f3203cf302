// A list of tensors as one sequence of elements.

#ifndef HVDTRAIN_CURSOR_H_
#define HVDTRAIN_CURSOR_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace hvdtrain {

// A tensor. `output` may be the memory of `input`; nullptr: the result is not needed.
struct Piece {
  const char* input;
  char* output;
  size_t elements;
};

// Copies the consecutive elements of a list of tensors, chunk by chunk.
class Cursor {
 public:
  Cursor(const std::vector<Piece>& pieces, size_t element_bytes)
      : pieces_(pieces), element_bytes_(element_bytes) {}

  void CopyTo(char* slot, size_t elements) {
    Advance(elements, [&](const Piece& piece, size_t start, size_t bytes) {
      // They are the same where a tensor is reduced in its memory.
      if (slot != piece.input + start) memcpy(slot, piece.input + start, bytes);
      slot += bytes;
    });
  }

  void CopyFrom(const char* result, size_t elements) {
    Advance(elements, [&](const Piece& piece, size_t start, size_t bytes) {
      char* const output = piece.output + start;
      if (piece.output != nullptr && output != result) memcpy(output, result, bytes);
      result += bytes;
    });
  }

  // The memory of the next elements of the result; nullptr if they are not all in one
  // tensor.
  char* Output(size_t elements) const {
    if (place_ == pieces_.size()) return nullptr;
    const Piece& piece = pieces_[place_];
    const bool is_one = elements <= piece.elements - position_;
    return is_one && piece.output ? piece.output + position_ * element_bytes_ : nullptr;
  }

  // Calls `use(piece, start, bytes)` for the parts of tensors that the next elements are.
  template <typename Use>
  void Advance(size_t elements, Use use) {
    while (elements > 0) {
      const Piece& piece = pieces_[place_];
      const size_t count = std::min(elements, piece.elements - position_);
      use(piece, position_ * element_bytes_, count * element_bytes_);
      elements -= count;
      position_ += count;
      if (position_ == piece.elements) {
        ++place_;
        position_ = 0;
      }
    }
  }

 private:
  const std::vector<Piece>& pieces_;
  const size_t element_bytes_;
  size_t place_ = 0;
  size_t position_ = 0;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_CURSOR_H_
