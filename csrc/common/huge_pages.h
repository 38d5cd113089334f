// Memory of megabytes that is read in order again and again: in huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvstore {

// Small pages end what the processor fetches ahead, at each of them.
template <class T>
struct HugePages {
  using value_type = T;
  static constexpr std::size_t kPage = std::size_t{2} << 20;

  HugePages() = default;
  template <class U>
  HugePages(const HugePages<U>&) {}  // NOLINT: allocators convert

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    const bool large = bytes >= kPage;
    const std::size_t alignment = large ? kPage : alignof(T) < sizeof(void*) ? sizeof(void*) : alignof(T);
    void* made = nullptr;
    if (::posix_memalign(&made, alignment, bytes)) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (large) ::madvise(made, bytes / kPage * kPage, MADV_HUGEPAGE);
#endif
    return static_cast<T*>(made);
  }
  void deallocate(T* made, std::size_t) { std::free(made); }

  template <class U>
  bool operator==(const HugePages<U>&) const { return true; }
  template <class U>
  bool operator!=(const HugePages<U>&) const { return false; }
};

template <class T>
using HugeVector = std::vector<T, HugePages<T>>;

}  // namespace kvstore
