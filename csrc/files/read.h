// Reads of files that are under way while something else is done.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

struct io_event;

namespace kvstore {

// Memory, and where in the file is what it takes.
struct Target {
  void* data;
  size_t size;
  uint64_t offset;
};

// Files that were opened with O_DIRECT are read side by side, a few requests at a time, and in the order in which that
// was asked for. Thread-safe. Linux's asynchronous I/O (io_submit(2)): a disk goes from one request to the next without
// a thread that would have to wake up and find a processor meanwhile.
class Reads {
 public:
  // A request takes at most `most_bytes`, a multiple of what O_DIRECT aligns to; `most_requests` are under way at once.
  // Throws std::system_error where the system has no asynchronous I/O, or has none left.
  Reads(size_t most_requests, size_t most_bytes);
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;
  // Waits for the requests that are under way; those that are not yet are never made.
  ~Reads();

  // Begins to fill the pieces in order; those that follow each other in the file share requests. File and memory must
  // stay until `wait` has returned, or this object is gone. Returns the number of the read, from 0 on.
  size_t begin(int fd, const Target* pieces, size_t count);

  // Whether a read has ended, so that `wait` returns at once. Waits for nothing, and may say no too long.
  bool has_ended(size_t number);

  // Waits until a read has ended: 0, or an error of the system; EIO where the file ends too soon.
  int wait(size_t number);

 private:
  struct Request;
  struct Read {
    size_t left = 0;  // requests
    int error = 0;
  };

  void submit();
  void harvest(std::unique_lock<std::mutex>& lock);
  void take(const io_event* events, long count, int error);
  void end(Request& request, int64_t result);

  const size_t most_requests_, most_bytes_;
  std::uint64_t context_;
  int owner_;  // the process; what is under way is not its forked children's
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Read> reads_;
  std::deque<std::unique_ptr<Request>> waiting_;
  size_t under_way_ = 0;
  bool harvesting_ = false;  // a thread waits for the system
  bool broken_ = false;      // the system forgot the context
};

}  // namespace kvstore
