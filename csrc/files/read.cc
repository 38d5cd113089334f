#include "files/read.h"

#include <cerrno>
#include <system_error>

#ifdef __linux__
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvstore {

namespace {

constexpr size_t kMostPieces = 512;  // of a request; below IOV_MAX, which is 1,024
constexpr unsigned kEvents = 32;     // that a context has room for, and so the most requests under way

// Contexts that nobody uses: to end one takes the system milliseconds, so some stay. A forked child cannot use them.
constexpr size_t kMostSpare = 32;

struct Spare {
  std::mutex mutex;
  int owner = 0;
  std::vector<std::uint64_t> contexts;
};

Spare& spare() {
  static Spare* const all = new Spare;  // never destroyed: reads may end after the statics do
  return *all;
}

std::uint64_t take_context() {
  Spare& all = spare();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.owner != ::getpid()) {
      all.contexts.clear();
      all.owner = ::getpid();
    }
    if (!all.contexts.empty()) {
      const std::uint64_t context = all.contexts.back();
      all.contexts.pop_back();
      return context;
    }
  }
  aio_context_t made = 0;
  if (::syscall(SYS_io_setup, kEvents, &made)) throw std::system_error(errno, std::generic_category(), "io_setup");
  return made;
}

void give_context(std::uint64_t context) {
  Spare& all = spare();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.owner == ::getpid() && all.contexts.size() < kMostSpare)
    all.contexts.push_back(context);
  else
    ::syscall(SYS_io_destroy, context);
}

}  // namespace

struct Reads::Request {
  size_t read;
  uint64_t bytes = 0;
  std::vector<iovec> pieces;
  iocb call{};
};

Reads::Reads(size_t most_requests, size_t most_bytes)
    : most_requests_(std::clamp<size_t>(most_requests, 1, kEvents)),
      most_bytes_(std::max<size_t>(most_bytes, 1)),
      context_(take_context()),
      owner_(::getpid()) {}

Reads::~Reads() {
  if (owner_ != ::getpid()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.clear();
  while (under_way_) harvest(lock);
  if (!broken_) give_context(context_);
}

size_t Reads::begin(int fd, const Target* pieces, size_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t number = reads_.size();
  reads_.emplace_back();
  std::unique_ptr<Request> request;
  uint64_t offset = 0;  // of the request
  const auto finish = [&] {
    iocb& call = request->call;
    call.aio_data = reinterpret_cast<std::uintptr_t>(request.get());
    call.aio_lio_opcode = IOCB_CMD_PREADV;
    call.aio_fildes = static_cast<std::uint32_t>(fd);
    call.aio_buf = reinterpret_cast<std::uintptr_t>(request->pieces.data());
    call.aio_nbytes = request->pieces.size();
    call.aio_offset = static_cast<std::int64_t>(offset);
    ++reads_[number].left;
    waiting_.push_back(std::move(request));
  };
  for (size_t i = 0; i < count; ++i) {
    if (request && pieces[i].offset != offset + request->bytes) finish();
    for (size_t at = 0; at < pieces[i].size;) {
      if (!request) {
        request = std::make_unique<Request>();
        request->read = number;
        offset = pieces[i].offset + at;
      }
      const size_t room = most_bytes_ - request->bytes, part = std::min(pieces[i].size - at, room);
      request->pieces.push_back({static_cast<char*>(pieces[i].data) + at, part});
      request->bytes += part;
      at += part;
      if (request->bytes == most_bytes_ || request->pieces.size() == kMostPieces) finish();
    }
  }
  if (request) finish();
  submit();
  return number;
}

bool Reads::has_ended(size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reads_[number].left && under_way_ && !harvesting_) {  // or whoever waits would wait for what was taken here
    io_event events[kEvents];
    timespec at_once{};
    const long count = ::syscall(SYS_io_getevents, context_, 0L, static_cast<long>(kEvents), events, &at_once);
    if (count > 0) take(events, count, 0);
  }
  return !reads_[number].left;
}

int Reads::wait(size_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (reads_[number].left) {
    if (harvesting_)
      changed_.wait(lock);
    else
      harvest(lock);
  }
  return reads_[number].error;
}

// Gives the system as many requests as may be under way.
void Reads::submit() {
  while (!waiting_.empty() && under_way_ < most_requests_) {
    iocb* calls[kEvents];
    const size_t count = std::min(waiting_.size(), most_requests_ - under_way_);
    for (size_t i = 0; i < count; ++i) calls[i] = &waiting_[i]->call;
    const long taken = ::syscall(SYS_io_submit, context_, static_cast<long>(count), calls);
    if (taken > 0) {
      under_way_ += static_cast<size_t>(taken);
      for (long i = 0; i < taken; ++i) {
        static_cast<void>(waiting_.front().release());  // the system has it; `harvest` takes it back
        waiting_.pop_front();
      }
    } else if (errno != EINTR) {
      const std::unique_ptr<Request> refused = std::move(waiting_.front());
      waiting_.pop_front();
      end(*refused, taken ? -errno : -EAGAIN);
    }
  }
}

// Waits for the system, without the lock, and notes what ended.
void Reads::harvest(std::unique_lock<std::mutex>& lock) {
  harvesting_ = true;
  lock.unlock();
  io_event events[kEvents];
  long count;
  do count = ::syscall(SYS_io_getevents, context_, 1L, static_cast<long>(kEvents), events, nullptr);
  while (count < 0 && errno == EINTR);
  const int error = count < 0 ? errno : 0;
  lock.lock();
  harvesting_ = false;
  take(events, count, error);
}

// Notes what ended, and hands over what waited for it.
void Reads::take(const io_event* events, long count, int error) {
  if (error) {  // nothing can be waited for any more
    broken_ = true;
    under_way_ = 0;
    waiting_.clear();
    for (Read& read : reads_)
      if (std::exchange(read.left, 0)) read.error = error;
  }
  under_way_ -= error ? 0 : static_cast<size_t>(count);
  for (long i = 0; i < count; ++i) {
    const std::unique_ptr<Request> ended(reinterpret_cast<Request*>(static_cast<std::uintptr_t>(events[i].data)));
    end(*ended, events[i].res);
  }
  submit();
  changed_.notify_all();
}

void Reads::end(Request& request, int64_t result) {
  Read& read = reads_[request.read];
  --read.left;
  if (result < 0)
    read.error = static_cast<int>(-result);
  else if (static_cast<uint64_t>(result) != request.bytes && !read.error)
    read.error = EIO;
}

}  // namespace kvstore

#else

namespace kvstore {

struct Reads::Request {};

Reads::Reads(size_t most_requests, size_t most_bytes)
    : most_requests_(most_requests), most_bytes_(most_bytes), context_(0), owner_(0) {
  throw std::system_error(ENOSYS, std::generic_category(), "asynchronous I/O");
}
Reads::~Reads() = default;
size_t Reads::begin(int, const Target*, size_t) { return 0; }
bool Reads::has_ended(size_t) { return true; }
int Reads::wait(size_t) { return ENOSYS; }

}  // namespace kvstore

#endif
