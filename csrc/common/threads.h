// Work that several threads share.
#pragma once

#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace kvstore {

// Calls work(i, begin, end) for `threads` ranges that make up [0, count), each on a thread of its own, the last on the
// caller's, and those that the system gives no thread, too. Raises the first error in the order of ranges.
template <class Work>
void in_parts(size_t count, unsigned threads, const Work& work) {
  std::vector<std::exception_ptr> errors(threads);
  const auto part = [&](unsigned i) {
    try {
      work(i, count * i / threads, count * (i + 1) / threads);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  unsigned i = 0;
  try {
    for (; i + 1 < threads; ++i) others.emplace_back(part, i);
  } catch (const std::system_error&) {
  }
  for (; i < threads; ++i) part(i);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace kvstore
