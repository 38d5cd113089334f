// The memory that the trie is made of: growing arrays, the child table and the record table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <unordered_map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvstore {

// A growing array of plain values, aligned to a cache line. It grows by an eighth, not by doubling,
// because the token arena is nearly all the memory of the index; on Linux large arrays move by
// remapping pages, so growing copies nothing and untouched capacity is not resident. Large arrays ask
// for huge pages: a look-up in gigabytes of tokens is otherwise bound by TLB misses. One that is made at
// once ends with a small page: it may never grow, and a huge page is resident even if little of it is used.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable<T>::value, "moved with memcpy");

 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }
  size_t bytes() const { return capacity_ * sizeof(T); }

  void reserve(size_t wanted) {
    if (wanted > capacity_) grow(wanted);
  }
  void append(const T* from, size_t count) {
    reserve(size_ + count);
    if (count) std::memcpy(static_cast<void*>(data_ + size_), from, count * sizeof(T));
    size_ += count;
  }
  void append_zeros(size_t count) {
    reserve(size_ + count);
    if (count) std::memset(static_cast<void*>(data_ + size_), 0, count * sizeof(T));
    size_ += count;
  }
  // The place of `count` more values, which the caller writes.
  T* extend(size_t count) {
    reserve(size_ + count);
    size_ += count;
    return data_ + (size_ - count);
  }
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  static constexpr size_t kLarge = size_t{4} << 20;
  static constexpr size_t kHuge = size_t{2} << 20;
  static constexpr size_t kPage = 4096;

  static bool mapped(size_t bytes) {
#if defined(__linux__)
    return bytes >= kLarge;
#else
    (void)bytes;
    return false;
#endif
  }

  void release() {
    if (!data_) return;
#if defined(__linux__)
    if (mapped(bytes())) {
      ::munmap(static_cast<void*>(data_), bytes());
      return;
    }
#endif
    std::free(data_);
  }

  void grow(size_t wanted) {
    const size_t step = capacity_ + capacity_ / 8 + 64, next = std::max(step, wanted);
    if (next > (SIZE_MAX >> 1) / sizeof(T)) throw std::bad_alloc();
    size_t room = next * sizeof(T);
    T* fresh;
#if defined(__linux__)
    if (mapped(room)) {
      const size_t unit = wanted > step ? kPage : kHuge;
      // If T does not divide `room`, bytes() is a little less, which munmap and mremap round up to whole pages. It is
      // at least kLarge all the same: it is what `next` values take, or more.
      room = (room + unit - 1) & ~(unit - 1);
      fresh = static_cast<T*>(map_aligned(room));
      if (mapped(bytes()) && data_) {
        // The huge-page alignment of both ends lets the kernel move whole page tables.
        if (::mremap(static_cast<void*>(data_), bytes(), room, MREMAP_MAYMOVE | MREMAP_FIXED,
                     static_cast<void*>(fresh)) == MAP_FAILED) {
          ::munmap(static_cast<void*>(fresh), room);
          throw std::bad_alloc();
        }
      } else {
        if (size_) std::memcpy(static_cast<void*>(fresh), data_, size_ * sizeof(T));
        std::free(data_);
      }
      ::madvise(static_cast<void*>(fresh), room, MADV_HUGEPAGE);
      data_ = fresh;
      capacity_ = room / sizeof(T);
      return;
    }
#endif
    fresh = static_cast<T*>(std::aligned_alloc(64, (room + 63) & ~size_t{63}));
    if (!fresh) throw std::bad_alloc();
    if (size_) std::memcpy(static_cast<void*>(fresh), data_, size_ * sizeof(T));
    std::free(data_);
    data_ = fresh;
    capacity_ = next;  // and not what is allocated: by bytes() it is told what is mapped
  }

#if defined(__linux__)
  static void* map_aligned(size_t room) {
    const size_t span = room + kHuge;
    void* base = ::mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t begin = reinterpret_cast<uintptr_t>(base);
    const uintptr_t at = (begin + kHuge - 1) & ~uintptr_t{kHuge - 1};
    if (at > begin) ::munmap(base, at - begin);
    const size_t rest = begin + span - (at + room);
    if (rest) ::munmap(reinterpret_cast<void*>(at + room), rest);
    return reinterpret_cast<void*>(at);
  }
#endif

  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

inline uint64_t mix64(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  return x;
}

// Open addressing over 32-bit hashes: 8 bytes a slot. The key itself is not stored; the caller compares
// the node that it gets, which it must load anyway.
class ChildTable {
 public:
  struct Slot {
    uint32_t hash, node;  // node 0: empty
  };

  // The first slot of the probe sequence; the caller steps with next() until an empty slot.
  size_t home(uint32_t hash) const { return hash & mask_; }
  size_t next(size_t at) const { return (at + 1) & mask_; }
  const Slot& at(size_t i) const { return slots_[i]; }
  Slot& at(size_t i) { return slots_[i]; }
  bool empty() const { return slots_.size() == 0; }
  size_t bytes() const { return slots_.bytes(); }

  // Makes room for `more` further entries, so that insert() cannot fail.
  void reserve(size_t more) {
    size_t want = empty() ? 64 : slots_.size();
    while ((count_ + more) * 10 > want * 7) want *= 2;
    if (want != slots_.size()) rehash(want);
  }
  // Gives memory back once an eighth or less is in use.
  void shrink() {
    size_t want = slots_.size();
    while (want > 64 && count_ * 4 < want) want /= 2;
    if (want * 2 < slots_.size()) rehash(want);
  }
  void insert(uint32_t hash, uint32_t node) {
    size_t i = home(hash);
    while (slots_[i].node) i = next(i);
    slots_[i] = Slot{hash, node};
    ++count_;
  }
  void erase(size_t hole) {  // backward shift: no tombstones to slow later probes
    for (size_t i = next(hole); slots_[i].node; i = next(i)) {
      const size_t want = home(slots_[i].hash);
      if (((i - want) & mask_) >= ((i - hole) & mask_)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = Slot{0, 0};
    --count_;
  }

 private:
  void rehash(size_t size) {
    Buffer<Slot> old;
    old.append_zeros(size);
    old.swap(slots_);
    mask_ = size - 1;
    count_ = 0;
    for (size_t i = 0; i < old.size(); ++i)
      if (old[i].node) insert(old[i].hash, old[i].node);
  }

  Buffer<Slot> slots_;
  size_t mask_ = 0;
  size_t count_ = 0;
};

// Record id -> node: pages of a direct table. Ids only rise, so live pages are dense and a page is
// freed when its last record goes. The page index is hashed, so that a hostile id costs one page.
class RecordTable {
 public:
  uint32_t get(uint64_t id) const {  // 0: unknown
    if (recent_ && recent_key_ == id / kPage) return recent_->node[id % kPage];
    const auto page = pages_.find(id / kPage);
    return page == pages_.end() ? 0 : page->second->node[id % kPage];
  }
  // Makes the page of this id exist, so that set() cannot fail.
  void prepare(uint64_t id) {
    if (recent_ && recent_key_ == id / kPage) return;
    auto page = pages_.find(id / kPage);
    if (page == pages_.end()) page = pages_.emplace(id / kPage, std::make_unique<Page>()).first;
    recent_key_ = id / kPage;
    recent_ = page->second.get();
  }
  void set(uint64_t id, uint32_t node) {
    prepare(id);
    recent_->used += recent_->node[id % kPage] == 0;
    recent_->node[id % kPage] = node;
  }
  void erase(uint64_t id) {
    const auto page = pages_.find(id / kPage);
    page->second->node[id % kPage] = 0;
    if (--page->second->used) return;
    recent_ = nullptr;
    pages_.erase(page);
  }
  void clear() {
    recent_ = nullptr;
    pages_.clear();
  }
  size_t bytes() const { return pages_.size() * (sizeof(Page) + 48) + pages_.bucket_count() * sizeof(void*); }

 private:
  static constexpr uint64_t kPage = 256;
  struct Page {
    uint32_t node[kPage] = {};
    uint32_t used = 0;
  };
  struct Mixed {
    size_t operator()(uint64_t page) const { return mix64(page); }
  };
  std::unordered_map<uint64_t, std::unique_ptr<Page>, Mixed> pages_;
  // The page of the last write, as ids come in runs. Only writers change it, and they exclude readers.
  uint64_t recent_key_ = 0;
  Page* recent_ = nullptr;
};

}  // namespace kvstore
