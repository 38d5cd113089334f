// The symbol of a number: the best of error and price. Included by lossy/encode/rows.h only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lossy/encode/encoder.h"

namespace kvstore::lossy {

constexpr int kMostNumber = 32767;  // of an escape's magnitude

struct Choice {
  int magnitude;
  bool escaped;
};

// x: what is to be coded, in steps, more than a half; of: the class, those of V kClasses higher. Of equals the last
// that is looked at is taken, as in lossy_quantiser.choose.
inline Choice chosen(const Encoder& encoder, std::size_t of, float x) {
  const float most = std::min(x, static_cast<float>(kMostNumber));
  const float whole = (most + 0x1p23f) - 0x1p23f;  // to the nearest, half-way cases to even
  const float *const price = encoder.price(of), *const centroids = encoder.centroids(of);
  const int below = static_cast<int>(std::min(x, static_cast<float>(kLargest - 1)));
  Choice best{static_cast<int>(whole), true};
  float cost = (x - whole) * (x - whole) + encoder.escape(of);
  for (const int k : {below + 1, below, 0}) {
    const float miss = x - centroids[k];
    const float found = miss * miss + price[k];
    const bool better = found <= cost;
    best = {better ? k : best.magnitude, best.escaped && !better};
    cost = better ? found : cost;
  }
  return best;
}

}  // namespace kvstore::lossy
