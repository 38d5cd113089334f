// The twins of the predictive codec's loops, which of them runs, and what it takes to run them. Included by
// predictive/predictive.cc, lossy/lossy.cc and the donor codec only.
#pragma once

#include <cfenv>
#include <cstddef>
#include <memory>

#include "common/cpu.h"
#include "predictive/avx2-inl.h"
#include "predictive/avx512-inl.h"
#include "predictive/scalar-inl.h"

#undef KVSTORE_TWIN

namespace kvstore::predict {

inline const Kernels& kernels(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512 && avx512::runs()) return avx512::kKernels;
  if (level >= Level::avx2) return avx2::kKernels;
#endif
  (void)level;
  return plain::kKernels;
}

// Rounds to nearest and keeps subnormal numbers while it lives, whatever the caller's thread is set to.
class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloats() { std::fesetenv(&before_); }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
  std::fenv_t before_;
};

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
