// Python bindings of the lossy mode of the predictive codec: encoding. Arrays are copied. Encoding releases the GIL.
#include "bindings/lossy_encode.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/model.h"
#include "lossy/encode/encoder.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("lossy");
constexpr std::int64_t kMostEvery = 4096;

std::shared_ptr<lossy::Encoder> build(const std::shared_ptr<lossy::Model>& model, const Lists& analysis,
                                      const Lists& focus, const Lists& basis, const MaybeArray& price,
                                      const MaybeArray& escape, const MaybeArray& centroids) {
  const std::vector<lossy::Part>& parts = model->parts();
  for (const Lists* list : {&analysis, &focus, &basis})
    if (list->size() != parts.size()) kChecks.refuse("expected an entry for K and V of every layer");
  lossy::EncoderArrays arrays{};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::size_t width = parts[i].sums.width;
    const std::size_t layer = parts[i / 2 * 2].sums.width + parts[i / 2 * 2 + 1].sums.width;
    const auto name = [i](const char* array) { return Checks::name_of(i, array); };
    arrays.parts.push_back({kChecks.needed<float>(analysis[i], name("analysis"), {width, width}),
                            kChecks.needed<float>(focus[i], name("focus"), {layer + 1}),
                            kChecks.needed<std::int8_t>(basis[i], name("basis"), {width, width})});
  }
  constexpr std::size_t classes = 2 * lossy::kClasses;
  arrays.price = kChecks.needed<float>(price, "price", {classes, lossy::kLargest + 1});
  arrays.escape = kChecks.needed<float>(escape, "escape", {classes});
  arrays.centroids = kChecks.needed<float>(centroids, "centroids", {classes, lossy::kLargest + 1});
  return std::make_shared<lossy::Encoder>(model, arrays);
}

lossy::Steps steps_of(const std::pair<double, double>& sizes, const std::pair<int, int>& quarters) {
  const lossy::Steps made{{static_cast<float>(sizes.first), static_cast<float>(sizes.second)},
                          {quarters.first, quarters.second}};
  for (std::size_t which = 0; which < 2; ++which) {
    if (!(made.sizes[which] > 0 && made.sizes[which] < lossy::kMostStep))
      throw py::value_error("steps: expected two numbers above 0 and below 1e6");
    if (made.quarters[which] < -lossy::kMostScale || made.quarters[which] > lossy::kMostScale)
      throw py::value_error("quarters: expected two numbers from -400 to 400");
  }
  return made;
}

// The bytes of each layer; None if `out` is too short; FALL_BACK.
py::object encode(const lossy::Encoder& encoder, const py::array& ids, std::int64_t start, const py::array& table,
                  const std::pair<double, double>& sizes, const std::pair<int, int>& quarters, const py::buffer& out,
                  const std::optional<std::size_t>& limit, const MaybeLevel& level, std::int64_t every) {
  const lossy::Model& model = encoder.model();
  const Longs tokens = tokens_of(ids);
  const std::vector<Rows> rows = rows_of(table, model.parts().size());
  const lossy::Block block{tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data(), every};
  if (every < 1 || every > kMostEvery) throw py::value_error("every: expected 1 to 4096");
  if (!lossy::codable(model, block.count)) kChecks.refuse("a block has more values than can be coded at once");
  const lossy::Steps steps = steps_of(sizes, quarters);
  const Level twin = level_of(level);
  const Memory memory(out, true);
  std::vector<std::uint64_t> layers(model.parts().size() / 2);
  const int result = unlocked([&] {
    return lossy::encode(encoder, block, steps, memory.data(), memory.size(), limit.value_or(SIZE_MAX), layers.data(),
                         twin);
  });
  if (result == lossy::kFallBack) return py::int_(static_cast<int>(lossy::kFallBack));
  return sizes_if(result == 0, layers);
}

}  // namespace

void kvstore::bindings::bind_lossy_encoder(py::module_& m) {
  py::class_<lossy::Encoder, std::shared_ptr<lossy::Encoder>>(m, "Encoder")
      .def(py::init(&build), py::arg("model"), py::kw_only(), py::arg("analysis"), py::arg("focus"), py::arg("basis"),
           py::arg("price"), py::arg("escape"), py::arg("centroids"));
  m.def("encode", &encode, py::arg("encoder"), py::arg("tokens"), py::arg("start"), py::arg("rows"), py::arg("steps"),
        py::arg("quarters"), py::arg("out"), py::arg("limit") = py::none(), py::arg("level") = py::none(),
        py::arg("every") = 1);
  m.attr("FALL_BACK") = static_cast<int>(lossy::kFallBack);
}
