// Memory that kernels work in.
#pragma once

#include <cstddef>
#include <memory>

#include "predictive/kernels.h"

namespace kvstore::predict {

// Memory whose first use is writing; every buffer has room for what kernels write beyond.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count) : data_(new T[count + kSlack]) {}
  T* get() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
};

}  // namespace kvstore::predict
