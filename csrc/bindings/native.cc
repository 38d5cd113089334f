#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/rows.h"
#include "entropy/entropy.h"
#include "splitzip/splitzip.h"

namespace py = pybind11;

namespace {

using Longs = py::array_t<std::int64_t, py::array::c_style>;
using Ints = py::array_t<std::uint32_t, py::array::c_style>;

std::vector<kvstore::Rows> rows_of(const Longs& table, py::ssize_t count) {
  if (table.ndim() != 2 || table.shape(0) != 3 || table.shape(1) != count)
    throw std::invalid_argument("rows: expected an int64 array [3, tensors] of address, head and token stride");
  std::vector<kvstore::Rows> rows(static_cast<std::size_t>(count));
  const std::int64_t* data = table.data();
  for (py::ssize_t i = 0; i < count; ++i)
    rows[static_cast<std::size_t>(i)] = {static_cast<std::uint64_t>(data[i]), data[count + i], data[2 * count + i]};
  return rows;
}

void copy_rows(const Longs& target, const Longs& source, const Ints& heads, const Ints& row_bytes,
               std::size_t tokens) {
  const py::ssize_t count = heads.size();
  if (row_bytes.size() != count) throw std::invalid_argument("heads and row_bytes: expected the same length");
  const auto to = rows_of(target, count);
  const auto from = rows_of(source, count);
  py::gil_scoped_release release;
  kvstore::copy_rows(to.data(), from.data(), heads.data(), row_bytes.data(), static_cast<std::size_t>(count), tokens);
}

kvstore::splitzip::Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return kvstore::splitzip::Dtype::bfloat16;
  if (name == "float16") return kvstore::splitzip::Dtype::float16;
  if (name == "float32") return kvstore::splitzip::Dtype::float32;
  if (name == "float8_e5m2") return kvstore::splitzip::Dtype::float8_e5m2;
  if (name == "float8_e4m3fn") return kvstore::splitzip::Dtype::float8_e4m3fn;
  throw std::invalid_argument("splitzip: no such dtype: " + name);
}

kvstore::Level level_of(const std::optional<std::string>& name) {
  const kvstore::Level best = kvstore::level();
  if (!name) return best;
  kvstore::Level wanted;
  if (kvstore::level_named(name->c_str(), &wanted) && wanted <= best) return wanted;
  throw std::invalid_argument("level: " + *name + " is not one that this machine has");
}

py::buffer_info contiguous(const py::buffer& buffer, bool writable) {
  py::buffer_info memory = buffer.request(writable);
  if (memory.ndim != 1 || (memory.size > 1 && memory.strides[0] != memory.itemsize))
    throw std::invalid_argument("buffer: expected one dimension without gaps");
  return memory;
}

// The arguments of all three functions below, checked.
struct Call {
  kvstore::splitzip::Shape shape;
  std::vector<std::uint64_t> bounds;

  Call(const std::string& dtype, const Ints& heads, const Ints& row_bytes, std::size_t tokens)
      : shape{dtype_of(dtype), static_cast<std::size_t>(heads.size()) / 2, heads.data(), row_bytes.data(), tokens} {
    if (heads.size() % 2 || row_bytes.size() != heads.size())
      throw std::invalid_argument("heads and row_bytes: expected keys and values of every layer");
    // So that no sum of sizes overflows; the format's own limit is far below.
    double total = 0;
    for (py::ssize_t i = 0; i < heads.size(); ++i)
      total += static_cast<double>(heads.data()[i]) * row_bytes.data()[i] * static_cast<double>(tokens);
    if (total >= 1e12) throw std::invalid_argument("splitzip: a block has more values than can be coded at once");
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      bounds.push_back(kvstore::splitzip::bound(shape, layer));
      if (!bounds.back()) throw std::invalid_argument("splitzip: a layer has more values than can be coded at once");
    }
  }
  std::uint64_t bound() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t nbytes : bounds) sum += nbytes;
    return sum;
  }
};

using Halves = py::array_t<std::uint16_t, py::array::c_style>;

std::unique_ptr<kvstore::entropy::Model> entropy_model(const Halves& freqs, const Halves& costs) {
  const py::ssize_t size = 2 * kvstore::entropy::kClasses * kvstore::entropy::kSymbols;
  if (freqs.size() != size || costs.size() != size) throw std::invalid_argument("tables: expected [2, 16, 193]");
  auto model = std::make_unique<kvstore::entropy::Model>();
  if (!model->build(freqs.data(), costs.data())) throw std::invalid_argument("tables: frequencies must sum to 4096");
  return model;
}

// The most bytes that a block can take, and what it takes usually.
py::tuple bounds(const std::string& dtype, const Ints& heads, const Ints& row_bytes, std::size_t tokens, bool entropy) {
  const Call call(dtype, heads, row_bytes, tokens);
  std::uint64_t usual = kvstore::splitzip::kChunk;  // the last chunk is begun only where it fits, whatever it holds
  for (std::size_t layer = 0; layer < call.shape.layers; ++layer)
    usual += entropy ? kvstore::entropy::usual(call.shape, layer) : kvstore::splitzip::usual(call.shape, layer);
  return py::make_tuple(call.bound(), std::min(usual, call.bound()));
}

// The bytes of each layer; None where `out` is too short. model: codes with entropy where given.
std::optional<py::tuple> encode(const std::string& dtype, const Ints& heads, const Ints& row_bytes, std::size_t tokens,
                                const Longs& source, const py::buffer& out, const kvstore::entropy::Model* model,
                                const std::optional<std::string>& level) {
  const Call call(dtype, heads, row_bytes, tokens);
  const auto rows = rows_of(source, heads.size());
  const py::buffer_info memory = contiguous(out, true);
  auto* const begin = static_cast<std::uint8_t*>(memory.ptr);
  const auto capacity = static_cast<std::size_t>(memory.size * memory.itemsize);
  const kvstore::Level chosen = level_of(level);
  std::vector<std::uint64_t> sizes(call.shape.layers);
  std::size_t raw = 0;
  {
    py::gil_scoped_release release;
    raw = model ? kvstore::entropy::encode(*model, call.shape, rows.data(), begin, capacity, sizes.data(), chosen)
                : kvstore::splitzip::encode(call.shape, rows.data(), begin, capacity, sizes.data(), chosen);
  }
  if (raw == kvstore::splitzip::kTooShort) return std::nullopt;
  return py::tuple(py::cast(sizes));
}

// What is wrong with the payload, or None.
std::optional<std::string> decode(const std::string& dtype, const Ints& heads, const Ints& row_bytes,
                                  std::size_t tokens, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, const Longs& target, std::size_t wanted,
                                  const kvstore::entropy::Model* model, const std::optional<std::string>& level) {
  const Call call(dtype, heads, row_bytes, tokens);
  const auto rows = rows_of(target, heads.size());
  if (sizes.size() != call.shape.layers) throw std::invalid_argument("sizes: expected one a layer");
  if (wanted > tokens) throw std::invalid_argument("wanted: more tokens than there are");
  const py::buffer_info memory = contiguous(payload, false);
  const auto* const begin = static_cast<const std::uint8_t*>(memory.ptr);
  const auto nbytes = static_cast<std::size_t>(memory.size * memory.itemsize);
  const kvstore::Level chosen = level_of(level);
  const char* wrong = nullptr;
  {
    py::gil_scoped_release release;
    const auto* const to = rows.data();
    wrong = model ? kvstore::entropy::decode(*model, call.shape, begin, nbytes, sizes.data(), to, wanted, chosen)
                  : kvstore::splitzip::decode(call.shape, begin, nbytes, sizes.data(), to, wanted, chosen);
  }
  return wrong ? std::optional<std::string>(wrong) : std::nullopt;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "C++ core of kvstore.codecs.";
  m.def("copy_rows", &copy_rows, py::arg("target"), py::arg("source"), py::arg("heads"), py::arg("row_bytes"),
        py::arg("tokens"));
  py::class_<kvstore::entropy::Model>(m, "EntropyModel")
      .def(py::init(&entropy_model), py::arg("freqs"), py::arg("costs"));
  m.def("bounds", &bounds, py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("entropy") = false);
  m.def("encode", &encode, py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("source"), py::arg("out"), py::arg("model") = py::none(), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("payload"), py::arg("sizes"), py::arg("target"), py::arg("wanted"), py::arg("model") = py::none(),
        py::arg("level") = py::none());
}
