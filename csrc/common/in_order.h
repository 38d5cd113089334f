// Blocks whose layers are decoded one after the other, each with what those before say of it.
#pragma once

#include <cstddef>
#include <new>

#include "common/plain_floats.h"

namespace kvstore {

// The layers of a block, some of which are decoded. What it was made of must outlive it.
class InOrder {
 public:
  InOrder() = default;
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
  virtual ~InOrder() = default;

  // Decodes the layers below `end`, at most as many as there are, that are still to come. Returns what is damaged, or
  // null; what is damaged once is damaged from then on. Throws std::bad_alloc only, and then again.
  const char* until(std::size_t end) {
    const PlainFloats floats;
    for (; wrong_ == nullptr && next_ < 2 * end; ++next_) {
      if (half_done_) throw std::bad_alloc();
      half_done_ = true;
      wrong_ = part(next_);
      half_done_ = false;
    }
    return wrong_;
  }

 protected:
  const char* wrong_ = nullptr;

 private:
  // Decodes K or V of a layer; parts come in order.
  virtual const char* part(std::size_t number) = 0;

  std::size_t next_ = 0;
  bool half_done_ = false;
};

}  // namespace kvstore
