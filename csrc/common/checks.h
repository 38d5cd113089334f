// Checks of the arrays that a caller hands over: a profile's, a model's, a block's. What is wrong is thrown as
// std::invalid_argument, with the name of the codec before it.
#pragma once

#include <cfloat>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvstore {

class Checks {
 public:
  explicit constexpr Checks(const char* codec) : codec_(codec) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument(std::string(codec_) + ": " + what);
  }

  // "3.v.scale" for part 7: K and V of layer after layer.
  static std::string name_of(std::size_t part, const char* array) {
    return std::to_string(part / 2) + (part % 2 ? ".v." : ".k.") + array;
  }

  template <class T>
  void range(const T* values, std::size_t count, int least, int most, const std::string& name) const {
    bool all = true;  // no end before the last one, so that the loop takes several at once
    for (std::size_t i = 0; i < count; ++i) all &= values[i] >= least && values[i] <= most;
    if (!all) refuse(name + ": expected numbers from " + std::to_string(least) + " to " + std::to_string(most));
  }

  // A copy, filled up to `padded` numbers with `fill`; every one of `values` must be positive and at most `limit`.
  std::vector<float> scales(const float* values, std::size_t count, std::size_t padded, float fill,
                            const std::string& name, float limit = FLT_MAX) const {
    for (std::size_t i = 0; i < count; ++i)
      if (!(values[i] > 0 && values[i] <= limit)) refuse(name + ": numbers must be finite and positive");
    std::vector<float> made(values, values + count);
    made.resize(padded, fill);
    return made;
  }

 private:
  const char* codec_;
};

}  // namespace kvstore
