// Copies that go past the caches: for results so large that what is written first has left them when it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvstore {

// Copies like memcpy. The bytes between the first and the last whole line of 64 bytes of `to` are written past the
// caches, the others as always. Whoever hands the result to another thread calls `stream_end` before.
inline void stream(void* to, const void* from, std::size_t nbytes) {
#if defined(__SSE2__)
  auto* out = static_cast<std::uint8_t*>(to);
  const auto* in = static_cast<const std::uint8_t*>(from);
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(out)) % 64;
  if (nbytes >= head + 64) {
    std::memcpy(out, in, head);
    out += head;
    in += head;
    nbytes -= head;
    for (; nbytes >= 64; nbytes -= 64, in += 64, out += 64) {
      const auto* source = reinterpret_cast<const __m128i*>(in);
      auto* target = reinterpret_cast<__m128i*>(out);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
  }
  std::memcpy(out, in, nbytes);
#else
  std::memcpy(to, from, nbytes);
#endif
}

// What was written past the caches is seen by whoever sees what this thread writes after it.
inline void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace kvstore
