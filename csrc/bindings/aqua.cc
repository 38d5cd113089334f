// Python bindings of AQUA-KV's layers. Arrays must have the exact dtype and size, otherwise a ValueError names the one
// that has not. Coding releases the GIL.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "aqua/aqua.h"
#include "bindings/arrays.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

std::vector<float> copied(const py::array& values, const char* name) {
  const View<const float> found = view<float>(values, name);
  return {found.data, found.data + found.size};
}

aqua::Higgs build_higgs(unsigned bits, const py::array& signs, const py::array& points) {
  return {bits, copied(signs, "signs"), copied(points, "points")};
}

aqua::Predictor build_predictor(const py::array& weights, std::size_t outputs) {
  const View<const float> found = view<float>(weights, "weights");
  if (outputs == 0 || found.size == 0 || found.size % outputs != 0)
    throw py::value_error("weights: expected rows of " + std::to_string(outputs) + " values");
  return {found.data, found.size / outputs - 1, outputs};
}

// What rows are predicted from, one part after the other, checked.
struct Inputs {
  std::vector<const float*> parts;
  std::vector<std::size_t> widths;

  Inputs() = default;
  Inputs(const aqua::Predictor& predictor, const std::vector<py::array>& inputs, std::size_t rows) {
    std::size_t total = 0;
    for (const py::array& part : inputs) {
      const View<const float> from = view<float>(part, "inputs");
      if (rows) same_size(from.size, from.size / rows * rows, "inputs");
      parts.push_back(from.data);
      widths.push_back(rows ? from.size / rows : 0);
      total += widths.back();
    }
    if (rows) same_size(total, predictor.inputs(), "inputs");
  }

  void predict(const aqua::Predictor& predictor, std::size_t rows, float* out, Level twin) const {
    aqua::predict(predictor, parts.data(), widths.data(), parts.size(), rows, out, twin);
  }
};

void predict(const aqua::Predictor& predictor, const std::vector<py::array>& inputs, const py::array& out,
             const MaybeLevel& cpu) {
  const View<float> to = writable_view<float>(out, "out");
  const std::size_t rows = to.size / predictor.outputs();
  same_size(to.size, rows * predictor.outputs(), "out");
  const Inputs checked(predictor, inputs, rows);
  if (rows == 0) return;
  const Level twin = level_of(cpu);
  unlocked([&] { checked.predict(predictor, rows, to.data, twin); });
}

// The arguments that coding a side shares, checked.
struct Call {
  aqua::Side side;
  const float* guess;
  const aqua::Predictor* predictor;
  Inputs inputs;
  float* found;
  Level twin;

  Call(const aqua::Higgs& higgs, const py::array& cache, bool writable, std::size_t heads, std::size_t sinks,
       const MaybeArray& cos, const MaybeArray& sin, const MaybeArray& given, const aqua::Predictor* map,
       const std::vector<py::array>& parts, const py::array& kept, const MaybeLevel& cpu)
      : predictor(map), twin(level_of(cpu)) {
    const View<const std::uint16_t> memory =
        writable ? View<const std::uint16_t>{writable_view<std::uint16_t>(cache, "cache").data,
                                             writable_view<std::uint16_t>(cache, "cache").size}
                 : view<std::uint16_t>(cache, "cache");
    if (heads == 0 || higgs.width() % heads != 0) throw py::value_error("heads: do not divide the width of a row");
    const std::size_t tokens = memory.size / higgs.width();
    same_size(memory.size, tokens * higgs.width(), "cache");
    if (sinks > tokens) throw py::value_error("sinks: more than there are tokens");
    const aqua::Turns none{nullptr, nullptr, 0};
    side = {const_cast<std::uint16_t*>(memory.data), heads, tokens, higgs.width() / heads, sinks, none};
    if (cos.has_value() != sin.has_value()) throw py::value_error("cos, sin: expected both or none");
    if (cos && side.rows()) {
      const std::size_t size = view<float>(*cos, "cos").size, pairs = size / side.rows();
      same_size(size, pairs * side.rows(), "cos");
      if (2 * pairs > side.dim) throw py::value_error("cos: more pairs than a head has");
      side.turns = {view<float>(*cos, "cos").data, column<float>(*sin, size, "sin"), pairs};
    }
    const std::size_t values = side.rows() * higgs.width();
    if (given && predictor) throw py::value_error("guess: a predictor makes it");
    guess = given ? column<float>(*given, values, "guess") : nullptr;
    if (predictor) {
      same_size(predictor->outputs(), higgs.width(), "predictor");
      inputs = Inputs(*predictor, parts, side.rows());
    }
    const View<float> room = writable_view<float>(kept, "found");
    same_size(room.size, values, "found");
    found = room.data;
  }

  // What `work` returns for the guess; without the GIL.
  template <class Work>
  auto run(Work&& work) const {
    return unlocked([&] {
      std::vector<float> predicted;
      if (predictor && side.rows()) {
        predicted.resize(side.rows() * side.width());
        inputs.predict(*predictor, side.rows(), predicted.data(), twin);
      }
      return work(predicted.empty() ? guess : predicted.data());
    });
  }
};

// Whether it could be coded.
bool encode(const aqua::Higgs& higgs, const py::array& cache, std::size_t heads, std::size_t sinks,
            const MaybeArray& cos, const MaybeArray& sin, const MaybeArray& guess, const aqua::Predictor* predictor,
            const std::vector<py::array>& inputs, const py::array& out, const py::array& found,
            const MaybeLevel& cpu) {
  const Call call(higgs, cache, false, heads, sinks, cos, sin, guess, predictor, inputs, found, cpu);
  const View<std::uint8_t> room = writable_view<std::uint8_t>(out, "out");
  same_size(room.size, higgs.bytes(call.side.rows()), "out");
  return call.run(
      [&](const float* rows) { return aqua::encode(higgs, call.side, rows, room.data, call.found, call.twin); });
}

std::optional<std::string> text(const char* damaged) {
  return damaged ? std::optional<std::string>(damaged) : std::nullopt;
}

// What is damaged, or None.
std::optional<std::string> decode(const aqua::Higgs& higgs, const py::array& cache, std::size_t heads,
                                  std::size_t sinks, const MaybeArray& cos, const MaybeArray& sin,
                                  const MaybeArray& guess, const aqua::Predictor* predictor,
                                  const std::vector<py::array>& inputs, const py::array& data,
                                  const py::array& found, const MaybeLevel& cpu) {
  const Call call(higgs, cache, true, heads, sinks, cos, sin, guess, predictor, inputs, found, cpu);
  const std::uint8_t* const from = column<std::uint8_t>(data, higgs.bytes(call.side.rows()), "data");
  return text(call.run(
      [&](const float* rows) { return aqua::decode(higgs, call.side, rows, from, call.found, call.twin); }));
}

bool encode_rows(const aqua::Higgs& higgs, const py::array& values, const py::array& out, const MaybeLevel& cpu) {
  const View<const float> from = view<float>(values, "values");
  const std::size_t rows = from.size / higgs.width();
  same_size(from.size, rows * higgs.width(), "values");
  const View<std::uint8_t> room = writable_view<std::uint8_t>(out, "out");
  same_size(room.size, higgs.bytes(rows), "out");
  const Level twin = level_of(cpu);
  return unlocked([&] { return aqua::encode_rows(higgs, from.data, rows, room.data, twin); });
}

std::optional<std::string> decode_rows(const aqua::Higgs& higgs, const py::array& data, const py::array& out,
                                       const MaybeLevel& cpu) {
  const View<float> room = writable_view<float>(out, "out");
  const std::size_t rows = room.size / higgs.width();
  same_size(room.size, rows * higgs.width(), "out");
  const std::uint8_t* const from = column<std::uint8_t>(data, higgs.bytes(rows), "data");
  const Level twin = level_of(cpu);
  return text(unlocked([&] { return aqua::decode_rows(higgs, from, rows, room.data, twin); }));
}

}  // namespace

PYBIND11_MODULE(_aqua, m) {
  m.doc() = "AQUA-KV's layers; see csrc/aqua/aqua.h.";
  py::class_<aqua::Predictor>(m, "Predictor")
      .def(py::init(&build_predictor), py::arg("weights"), py::arg("outputs"))
      .def("predict", &predict, py::arg("inputs"), py::arg("out"), py::arg("level") = py::none());
  py::class_<aqua::Higgs>(m, "Higgs")
      .def(py::init(&build_higgs), py::arg("bits"), py::arg("signs"), py::arg("points"))
      .def("encode_rows", &encode_rows, py::arg("values"), py::arg("out"), py::arg("level") = py::none())
      .def("decode_rows", &decode_rows, py::arg("data"), py::arg("out"), py::arg("level") = py::none())
      .def("encode", &encode, py::arg("cache"), py::arg("heads"), py::arg("sinks"), py::arg("cos"), py::arg("sin"),
           py::arg("guess"), py::arg("predictor").none(true), py::arg("inputs"), py::arg("out"), py::arg("found"),
           py::arg("level") = py::none())
      .def("decode", &decode, py::arg("cache"), py::arg("heads"), py::arg("sinks"), py::arg("cos"), py::arg("sin"),
           py::arg("guess"), py::arg("predictor").none(true), py::arg("inputs"), py::arg("data"), py::arg("found"),
           py::arg("level") = py::none());
}
