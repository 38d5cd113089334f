// Blocks whose layers are decoded one after the other, each with what those before say of it.
#pragma once

#include <cstddef>
#include <new>

#include "common/plain_floats.h"

namespace kvstore {

constexpr std::size_t kTogether = 4;  // blocks that are coded together at most

// The layers of a block, some of which are decoded. What it was made of must outlive it.
class InOrder {
 public:
  InOrder() = default;
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
  virtual ~InOrder() = default;

  // Decodes the layers below `end`, at most as many as there are, that are still to come. Returns what is damaged of
  // them, or null; what follows a damaged part is, too. Throws std::bad_alloc only, and then again.
  const char* until(std::size_t end) {
    InOrder* const self = this;
    until(&self, 1, end);
    return wrong(end);
  }

  // The same of `count` blocks; neighbours of one model are decoded together. See `wrong` of each.
  static void until(InOrder* const* blocks, std::size_t count, std::size_t end) {
    const PlainFloats floats;
    for (std::size_t done = 0, some; done < count; done += some) {
      for (some = 1; some < kTogether && done + some < count; ++some)
        if (blocks[done + some]->model() != blocks[done]->model()) break;
      for (std::size_t next = 0; next < 2 * end; ++next) step(blocks + done, some, next);
    }
  }

  // What is damaged below layer `end`, or null, once it was decoded until there.
  const char* wrong(std::size_t end) const { return next_ < 2 * end ? wrong_ : nullptr; }

 protected:
  const char* wrong_ = nullptr;

 private:
  // What blocks that are decoded together have in common.
  virtual const void* model() const = 0;
  // Decodes K or V of a layer of blocks of one model, of which this is the first; sets their `wrong_`. Parts come in
  // order.
  virtual void part(std::size_t number, InOrder* const* blocks, std::size_t count) = 0;

  // Decodes part `number` of those of at most kTogether blocks whose next one it is.
  static void step(InOrder* const* blocks, std::size_t count, std::size_t number) {
    InOrder* here[kTogether] = {};
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; ++i)
      if (blocks[i]->wrong_ == nullptr && blocks[i]->next_ == number) here[found++] = blocks[i];
    for (std::size_t i = 0; i < found; ++i)
      if (here[i]->half_done_) throw std::bad_alloc();
    for (std::size_t i = 0; i < found; ++i) here[i]->half_done_ = true;
    if (found != 0) here[0]->part(number, here, found);
    for (std::size_t i = 0; i < found; ++i) {
      here[i]->half_done_ = false;
      if (here[i]->wrong_ == nullptr) ++here[i]->next_;
    }
  }

  std::size_t next_ = 0;  // the part that comes next, or is damaged
  bool half_done_ = false;
};

// One that gains nothing from others.
class AloneInOrder : public InOrder {
 private:
  // Decodes K or V of a layer; returns what is damaged, or null.
  virtual const char* part(std::size_t number) = 0;

  const void* model() const final { return this; }
  void part(std::size_t number, InOrder* const*, std::size_t) final { wrong_ = part(number); }
};

}  // namespace kvstore
