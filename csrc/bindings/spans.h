// The arguments that calls of the donor codec's two modes share, checked.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/arrays.h"
#include "donor/donor.h"

namespace kvstore::bindings {

// A block of `count` rows from position `start` on. table: the row table of the block; spans: [spans, 3]: first row,
// rows, which angles; donors: a row table of each; angles: [angles, 2, half].
struct SpansCall {
  py::array turns;  // what `block` points into
  std::vector<Rows> rows;
  std::vector<std::vector<Rows>> donors;
  std::vector<donor::Span> spans;
  donor::Block block;
  Level twin;

  template <class Part>
  SpansCall(const ArrayChecks& checks, const std::vector<Part>& parts, std::int64_t start, std::size_t count,
            const py::array& table, const py::array& runs, const py::list& tables, const py::array& angles,
            bool propagated, const MaybeLevel& level)
      : turns(angles), rows(rows_of(table, parts.size())), twin(level_of(level)) {
    if (angles.ndim() != 3 || angles.shape(1) != 2) checks.refuse("angles: expected [angles, 2, half]");
    const auto number = static_cast<std::size_t>(angles.shape(0)), half = static_cast<std::size_t>(angles.shape(2));
    const auto* const given = checks.needed<std::int16_t>(angles, "angles", {number, 2, half});
    checks.range(given, number * 2 * half, -(1 << 14), 1 << 14, "angles");
    take_spans(checks, parts, count, runs, tables, number, half);
    block = {spans.data(), spans.size(), given, half, rows.data(), start, propagated};
  }
  SpansCall(const SpansCall&) = delete;
  SpansCall& operator=(const SpansCall&) = delete;

 private:
  template <class Part>
  void take_spans(const ArrayChecks& checks, const std::vector<Part>& parts, std::size_t count,
                  const py::array& runs, const py::list& tables, std::size_t turns, std::size_t half) {
    const auto all = static_cast<std::int64_t>(count);
    const std::size_t number = tables.size();
    if (number == 0) checks.refuse("spans: expected at least one");
    const auto* const ranges = checks.needed<std::int64_t>(runs, "spans", {number, 3});
    std::int64_t end = 0;
    for (std::size_t i = 0; i < number; ++i) {
      donors.push_back(rows_of(py::cast<py::array>(tables[i]), parts.size()));
      const std::int64_t first = ranges[3 * i], length = ranges[3 * i + 1], turn = ranges[3 * i + 2];
      if (first < end || length < 1 || length > all || first > all - length)
        checks.refuse("spans: expected disjoint rising runs of the block's rows");
      if (turn >= static_cast<std::int64_t>(turns))
        checks.refuse("spans: angle index out of range: " + std::to_string(turn) + " of " + std::to_string(turns));
      for (std::size_t p = 0; turn >= 0 && p < parts.size(); p += 2)
        if (parts[p].dim != 2 * half) checks.refuse("angles: expected half of every key's size");
      end = first + length;
      spans.push_back({static_cast<std::size_t>(first), static_cast<std::size_t>(length), turn, nullptr});
    }
    for (std::size_t i = 0; i < number; ++i) spans[i].donor = donors[i].data();
  }
};

}  // namespace kvstore::bindings
