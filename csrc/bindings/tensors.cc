// Tensors in memory that is there, for torch.utils.dlpack.from_dlpack: torch's own views and shapes let go of Python's
// lock at every tensor, and a program's other threads take it for milliseconds.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "bindings/arrays.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

// What a capsule of the name "dltensor" holds (DLPack 0.x).
struct DLDevice {
  std::int32_t device_type, device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
constexpr std::int32_t kCpu = 1;
constexpr const char* kName = "dltensor";
constexpr int kDimensions = 4;

// A tensor, and the Python object that keeps its memory.
struct Held {
  DLManagedTensor managed{};
  std::int64_t shape[kDimensions], strides[kDimensions];
  PyObject* owner;

  static void drop(DLManagedTensor* managed) {
    const std::unique_ptr<Held> held(static_cast<Held*>(managed->manager_ctx));
    if (!Py_IsInitialized()) return;  // the memory ends with the process
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(held->owner);
    PyGILState_Release(state);
  }

  // Of a capsule that nobody made a tensor of; then it has another name.
  static void drop_capsule(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, kName)) return;
    auto* const managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kName));
    managed->deleter(managed);
  }
};

// Capsules of tensors [1, heads, rows, dim] of numbers of `code` and `bits`, as DLPack has them, in memory for
// `capacity` rows of each head.
py::list capsules(const py::object& owner, const Longs& addresses, const Ints& heads, const Ints& dims,
                  std::int64_t capacity, std::int64_t rows, int code, int bits) {
  if (addresses.ndim() != 1 || addresses.size() != heads.size() || addresses.size() != dims.size())
    throw py::value_error("addresses, heads and dims: expected the same length");
  if (rows < 0 || rows > capacity) throw py::value_error("rows: expected 0 to as many as there is room for");
  py::list found;
  for (py::ssize_t i = 0; i < addresses.size(); ++i) {
    const std::int64_t lines = heads.data()[i], dim = dims.data()[i];
    if (dim && lines && capacity > std::numeric_limits<std::int64_t>::max() / dim / lines)
      throw py::value_error("capacity: the tensors would have too many numbers");
    auto held = std::make_unique<Held>();
    const std::int64_t shape[] = {1, lines, rows, dim}, strides[] = {lines * capacity * dim, capacity * dim, dim, 1};
    std::copy_n(shape, kDimensions, held->shape);
    std::copy_n(strides, kDimensions, held->strides);
    DLTensor& tensor = held->managed.dl_tensor;
    tensor.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(addresses.data()[i]));
    tensor.device = {kCpu, 0};
    tensor.ndim = kDimensions;
    tensor.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
    tensor.shape = held->shape;
    tensor.strides = held->strides;
    held->managed.manager_ctx = held.get();
    held->managed.deleter = Held::drop;
    PyObject* const capsule = PyCapsule_New(&held->managed, kName, Held::drop_capsule);
    if (!capsule) throw py::error_already_set();
    held->owner = owner.ptr();
    Py_INCREF(held->owner);
    static_cast<void>(held.release());  // the capsule has it
    found.append(py::reinterpret_steal<py::object>(capsule));
  }
  return found;
}

}  // namespace

PYBIND11_MODULE(_tensors, m) {
  m.doc() = "Tensors in memory that is there; see kvstore.read.result.";
  m.def("capsules", &capsules, py::arg("owner"), py::arg("addresses"), py::arg("heads"), py::arg("dims"),
        py::arg("capacity"), py::arg("rows"), py::arg("code"), py::arg("bits"));
}
