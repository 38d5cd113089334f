#include "lossy/encode/encoder.h"

#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "common/checks.h"
#include "lossy/encode/kernels.h"

namespace kvstore::lossy {
namespace {

constexpr Checks kChecks("lossy");

void check_finite(const float* values, std::size_t count, const std::string& name) {
  for (std::size_t i = 0; i < count; ++i)
    if (!std::isfinite(values[i])) kChecks.refuse(name + ": numbers must be finite");
}

template <class T>
std::vector<T> padded(const T* from, std::size_t rows, std::size_t width, std::size_t stride) {
  std::vector<T> made(rows * stride, T{0});
  for (std::size_t r = 0; r < rows; ++r) std::memcpy(made.data() + r * stride, from + r * width, width * sizeof(T));
  return made;
}

}  // namespace

Encoder::Encoder(std::shared_ptr<const Model> model, const EncoderArrays& arrays) : model_(std::move(model)) {
  const std::vector<lossy::Part>& parts = model_->parts();
  if (arrays.parts.size() != parts.size()) kChecks.refuse("expected an entry for K and V of every layer");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const EncoderPartArrays& from = arrays.parts[i];
    const std::size_t width = parts[i].sums.width, stride = predict::round_up(width, kWide);
    const std::size_t layer = parts[i / 2 * 2].sums.width + parts[i / 2 * 2 + 1].sums.width;
    check_finite(from.analysis, width * width, Checks::name_of(i, "analysis"));
    check_finite(from.focus, layer + 1, Checks::name_of(i, "focus"));
    parts_.push_back({stride, padded(from.analysis, width, width, stride),
                      std::vector<float>(from.focus, from.focus + layer + 1),
                      padded(from.basis, width, width, stride)});
  }
  price_.assign(arrays.price, arrays.price + 2 * kClasses * (kLargest + 1));
  escape_.assign(arrays.escape, arrays.escape + 2 * kClasses);
  centroids_.assign(arrays.centroids, arrays.centroids + 2 * kClasses * (kLargest + 1));
  check_finite(centroids_.data(), centroids_.size(), "centroids");
  for (const float x : price_)
    if (!(x >= 0)) kChecks.refuse("price: expected numbers from 0, or infinity");
  for (const float x : escape_)
    if (!(x >= 0 && std::isfinite(x))) kChecks.refuse("escape: expected finite numbers from 0");
}

}  // namespace kvstore::lossy
