// A lock that readers share and writers hold alone, in which a stream of readers cannot starve a writer.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace kvstore {

// A writer announces itself, then waits for the readers in flight; readers that come later queue behind it at the gate.
class FairLock {
 public:
  struct Exclusive {
    explicit Exclusive(FairLock& of) : lock(of.lock_, std::defer_lock) {
      of.writers_.fetch_add(1);
      std::lock_guard<std::mutex> gate(of.gate_);
      lock.lock();
      of.writers_.fetch_sub(1);
    }
    std::unique_lock<std::shared_mutex> lock;
  };
  struct Shared {
    explicit Shared(FairLock& of) : lock(of.lock_, std::defer_lock) {
      if (of.writers_.load(std::memory_order_relaxed)) std::lock_guard<std::mutex> gate(of.gate_);
      lock.lock();
    }
    std::shared_lock<std::shared_mutex> lock;
  };

 private:
  std::shared_mutex lock_;
  std::mutex gate_;
  std::atomic<int> writers_{0};
};

}  // namespace kvstore
