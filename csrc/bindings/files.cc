// Python bindings of what writes files.
#include <cerrno>
#include <vector>

#include "bindings/arrays.h"
#include "files/write.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

// What the buffers of Python objects hold, for as long as this lives.
class Pieces {
 public:
  explicit Pieces(const py::sequence& buffers) {
    held_.reserve(buffers.size());
    for (const py::handle buffer : buffers) {
      held_.emplace_back();
      if (PyObject_GetBuffer(buffer.ptr(), &held_.back(), PyBUF_SIMPLE)) {
        held_.pop_back();
        release();
        throw py::error_already_set();
      }
      pieces_.push_back({held_.back().buf, static_cast<std::size_t>(held_.back().len)});
    }
  }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;
  ~Pieces() { release(); }

  const Piece* data() const { return pieces_.data(); }
  std::size_t size() const { return pieces_.size(); }

 private:
  void release() {
    for (Py_buffer& held : held_) PyBuffer_Release(&held);
    held_.clear();
  }

  std::vector<Py_buffer> held_;
  std::vector<Piece> pieces_;
};

std::uint64_t write_all(int fd, const py::sequence& buffers, std::uint64_t offset, std::size_t most_bytes,
                        std::size_t most_pieces) {
  if (!most_pieces) throw py::value_error("most_pieces: expected at least 1");
  const Pieces pieces(buffers);
  const Written written =
      unlocked([&] { return write_pieces(fd, pieces.data(), pieces.size(), offset, most_bytes, most_pieces); });
  if (written.error) {
    errno = written.error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return written.asked;
}

}  // namespace

PYBIND11_MODULE(_files, m) {
  m.doc() = "Writes many pieces of memory to a file without Python's lock; see kvstore.tiers.disk.fs.";
  m.def("write_all", &write_all, py::arg("fd"), py::arg("buffers"), py::arg("offset"), py::arg("most_bytes"),
        py::arg("most_pieces"));
}
