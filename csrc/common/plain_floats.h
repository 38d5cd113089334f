// The rounding that formats are defined with.
#pragma once

#include <cfenv>

namespace kvstore {

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

}  // namespace kvstore
