// Python bindings of what writes and reads files.
#include <cerrno>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "files/read.h"
#include "files/write.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

[[noreturn]] void raise(int error) {
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

// What the buffers of Python objects hold, for as long as this lives.
template <class Part, int flags>
class Pieces {
 public:
  explicit Pieces(const py::sequence& buffers) {
    held_.reserve(buffers.size());
    for (const py::handle buffer : buffers) {
      held_.emplace_back();
      if (PyObject_GetBuffer(buffer.ptr(), &held_.back(), flags)) {
        held_.pop_back();
        release();
        throw py::error_already_set();
      }
      pieces_.emplace_back();
      pieces_.back().data = held_.back().buf;
      pieces_.back().size = static_cast<std::size_t>(held_.back().len);
    }
  }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;
  ~Pieces() { release(); }

  Part* data() { return pieces_.data(); }
  auto begin() { return pieces_.begin(); }
  auto end() { return pieces_.end(); }
  std::size_t size() const { return pieces_.size(); }

 private:
  void release() {
    for (Py_buffer& held : held_) PyBuffer_Release(&held);
    held_.clear();
  }

  std::vector<Py_buffer> held_;
  std::vector<Part> pieces_;
};

std::uint64_t write_all(int fd, const py::sequence& buffers, std::uint64_t offset, std::size_t most_bytes,
                        std::size_t most_pieces) {
  if (!most_pieces) throw py::value_error("most_pieces: expected at least 1");
  Pieces<Piece, PyBUF_SIMPLE> pieces(buffers);
  const Written written =
      unlocked([&] { return write_pieces(fd, pieces.data(), pieces.size(), offset, most_bytes, most_pieces); });
  if (written.error) raise(written.error);
  return written.asked;
}

// Reads, with what each needs while it is under way.
class HeldReads {
 public:
  HeldReads(std::size_t most_requests, std::size_t most_bytes) try
      : reads_(std::make_unique<Reads>(most_requests, most_bytes)) {
  } catch (const std::system_error& error) {
    raise(error.code().value());
  }
  HeldReads(const HeldReads&) = delete;
  HeldReads& operator=(const HeldReads&) = delete;
  ~HeldReads() {
    unlocked([&] { reads_.reset(); });
  }

  // Buffers that follow each other in the file, from `offset` on.
  std::size_t begin_run(int fd, const py::sequence& buffers, std::uint64_t offset, py::object keep) {
    auto held = std::make_unique<Held>(buffers, std::move(keep));
    for (Target& piece : held->pieces) {
      piece.offset = offset;
      offset += piece.size;
    }
    return begin(fd, std::move(held));
  }

  std::size_t begin_apart(int fd, const py::sequence& buffers, const std::vector<std::uint64_t>& offsets,
                          py::object keep) {
    auto held = std::make_unique<Held>(buffers, std::move(keep));
    same_size(offsets.size(), held->pieces.size(), "offsets");
    auto offset = offsets.begin();
    for (Target& piece : held->pieces) piece.offset = *offset++;
    return begin(fd, std::move(held));
  }

  // Waits until a read has ended; how it ended, `wait` says.
  void settle(std::size_t number) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (number >= held_.size()) throw py::index_error("number: no such read was begun");
    }
    if (!reads_->has_ended(number)) unlocked([&] { reads_->wait(number); });
  }

  void wait(std::size_t number) {
    std::unique_ptr<Held> held;  // it is let go behind the lock
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (number < held_.size()) held = std::move(held_[number]);
    }
    if (!held) throw py::index_error("number: no such read is under way, or another thread waits for it");
    const int error = reads_->has_ended(number) ? reads_->wait(number) : unlocked([&] { return reads_->wait(number); });
    if (error) raise(error);
  }

 private:
  struct Held {
    Held(const py::sequence& buffers, py::object keep) : keep(std::move(keep)), pieces(buffers) {}
    py::object keep;
    Pieces<Target, PyBUF_WRITABLE> pieces;
  };

  std::size_t begin(int fd, std::unique_ptr<Held> held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_.push_back(nullptr);  // what can fail comes before the read is under way
    const std::size_t number = reads_->begin(fd, held->pieces.data(), held->pieces.size());
    held_[number] = std::move(held);
    return number;
  }

  std::mutex mutex_;  // guards held_
  std::deque<std::unique_ptr<Held>> held_;
  std::unique_ptr<Reads> reads_;
};

}  // namespace

PYBIND11_MODULE(_files, m) {
  m.doc() = "Writes and reads many pieces of memory without Python's lock; see kvstore.tiers.disk.fs.";
  m.def("write_all", &write_all, py::arg("fd"), py::arg("buffers"), py::arg("offset"), py::arg("most_bytes"),
        py::arg("most_pieces"));
  py::class_<HeldReads>(m, "Reads")
      .def(py::init<std::size_t, std::size_t>(), py::arg("most_requests"), py::arg("most_bytes"))
      .def("begin", &HeldReads::begin_run, py::arg("fd"), py::arg("buffers"), py::arg("offset"), py::arg("keep"))
      .def("begin_apart", &HeldReads::begin_apart, py::arg("fd"), py::arg("buffers"), py::arg("offsets"),
           py::arg("keep"))
      .def("settle", &HeldReads::settle, py::arg("number"))
      .def("wait", &HeldReads::wait, py::arg("number"));
}
