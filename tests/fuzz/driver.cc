// Runs a fuzz target with inputs that are changed by chance, and keeps those that reach something new. The targets have
// libFuzzer's entry point, so any other driver will do, too; this one needs gcc alone, and what it was compiled with:
// -fsanitize-coverage=trace-pc,trace-cmp (this file without).
//
//   target seconds=60 seed=1 out=FOLDER FOLDER...   starts from the files in the folders, writes what is new to `out`
//   target reduce=FOLDER FOLDER...                  writes the fewest and shortest inputs that reach as much
//   target FILE...                                  runs each file once
//
// A last line of JSON says what was done. An input that kills the process is in `out` (or here) as crash-*.
#include <dirent.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" void __sanitizer_set_death_callback(void (*)());
extern char __executable_start, etext;

namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr std::size_t kMostBytes = 4096, kCompares = 1 << 16, kRecent = 256;
constexpr int kSlow = 20;  // seconds that an input may take

// ---- what an input reaches ------------------------------------------------------------------------------------------

// Nothing that a traced part may share a compiled template with: it would be traced itself.
std::uint8_t* counts;  // by place in the program
std::uint32_t* touched;
std::size_t places = 0, touches = 0;
std::uint8_t compares[kCompares];  // by place, how many bits of the two sides were equal at the most
std::uint32_t compared[kCompares];
std::size_t comparisons = 0;
std::uint64_t recent[kRecent];  // what was compared with, and was not equal
std::size_t recent_next = 0;
bool tracing = false;

inline std::uint32_t place_of(const void* pc) {
  return static_cast<std::uint32_t>(static_cast<const char*>(pc) - &__executable_start);
}

inline void compare(const void* pc, std::uint64_t a, std::uint64_t b, int bits) {
  if (!tracing) return;
  if (a != b) recent[recent_next++ % kRecent] = a ^ (recent_next & 1 ? a ^ b : 0);
  const auto equal = static_cast<std::uint8_t>(bits - __builtin_popcountll(a ^ b) + 1);
  const std::uint32_t at = place_of(pc) * 2654435761u >> 16;
  if (compares[at] == 0) compared[comparisons++] = at;
  if (compares[at] < equal) compares[at] = equal;
}

}  // namespace

extern "C" {
void __sanitizer_cov_trace_pc() {
  if (!tracing) return;
  const std::uint32_t at = place_of(__builtin_return_address(0));
  if (at >= places) return;
  if (counts[at] == 0) touched[touches++] = at;
  if (counts[at] < 255) ++counts[at];
}
void __sanitizer_cov_trace_cmp1(std::uint8_t a, std::uint8_t b) { compare(__builtin_return_address(0), a, b, 8); }
void __sanitizer_cov_trace_cmp2(std::uint16_t a, std::uint16_t b) { compare(__builtin_return_address(0), a, b, 16); }
void __sanitizer_cov_trace_cmp4(std::uint32_t a, std::uint32_t b) { compare(__builtin_return_address(0), a, b, 32); }
void __sanitizer_cov_trace_cmp8(std::uint64_t a, std::uint64_t b) { compare(__builtin_return_address(0), a, b, 64); }
void __sanitizer_cov_trace_const_cmp1(std::uint8_t a, std::uint8_t b) { compare(__builtin_return_address(0), a, b, 8); }
void __sanitizer_cov_trace_const_cmp2(std::uint16_t a, std::uint16_t b) {
  compare(__builtin_return_address(0), a, b, 16);
}
void __sanitizer_cov_trace_const_cmp4(std::uint32_t a, std::uint32_t b) {
  compare(__builtin_return_address(0), a, b, 32);
}
void __sanitizer_cov_trace_const_cmp8(std::uint64_t a, std::uint64_t b) {
  compare(__builtin_return_address(0), a, b, 64);
}
void __sanitizer_cov_trace_cmpf(float, float) {}
void __sanitizer_cov_trace_cmpd(double, double) {}
void __sanitizer_cov_trace_switch(std::uint64_t value, std::uint64_t* cases) {
  if (!tracing) return;
  for (std::uint64_t i = 0; i < cases[0]; ++i)
    if (cases[2 + i] != value) recent[recent_next++ % kRecent] = cases[2 + i];
}
}

namespace {

std::unordered_map<std::uint32_t, std::uint8_t> seen;  // place -> which orders of counts
std::unordered_map<std::uint32_t, std::uint8_t> seen_compares;

std::uint8_t order(std::uint8_t count) {
  const std::uint8_t borders[] = {1, 2, 3, 7, 15, 31, 127};
  return static_cast<std::uint8_t>(1u << (std::lower_bound(borders, borders + 7, count) - borders));
}

// ---- runs -----------------------------------------------------------------------------------------------------------

Bytes current;
std::string out_folder = ".";
std::uint64_t executions = 0;

std::string name_of(const Bytes& input, const char* kind) {
  std::uint64_t hash = 14695981039346656037u;
  for (const std::uint8_t byte : input) hash = (hash ^ byte) * 1099511628211u;
  char name[40];
  std::snprintf(name, sizeof name, "%s%016llx", kind, static_cast<unsigned long long>(hash));
  return name;
}

void save(const std::string& folder, const Bytes& input, const char* kind) {
  std::ofstream file(folder + "/" + name_of(input, kind), std::ios::binary);
  file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
}

void died() { save(out_folder, current, "crash-"); }

void too_slow(int) {
  save(out_folder, current, "slow-");
  static const char text[] = "an input takes too long\n";
  if (write(2, text, sizeof text - 1) < 0) _exit(71);
  _exit(70);
}

// How many new features the input has; they are remembered.
std::size_t run(const Bytes& input) {
  current = input;
  const Bytes exact(input);  // of its own size, so that what lies behind it is noticed
  alarm(kSlow);
  tracing = true;
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  tracing = false;
  ++executions;
  std::size_t fresh = 0;
  for (std::size_t i = 0; i < touches; ++i) {
    const std::uint32_t at = touched[i];
    std::uint8_t& known = seen[at];
    const std::uint8_t now = order(counts[at]);
    fresh += !(known & now);
    known |= now;
    counts[at] = 0;
  }
  touches = 0;
  for (std::size_t i = 0; i < comparisons; ++i) {
    const std::uint32_t at = compared[i];
    std::uint8_t& known = seen_compares[at];
    fresh += compares[at] > known;
    known = std::max(known, compares[at]);
    compares[at] = 0;
  }
  comparisons = 0;
  return fresh;
}

std::vector<Bytes> read(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    DIR* const folder = opendir(name.c_str());
    if (folder == nullptr) {
      files.push_back(name);
      continue;
    }
    while (const dirent* const entry = readdir(folder))
      if (entry->d_name[0] != '.') files.push_back(name + "/" + entry->d_name);
    closedir(folder);
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> found;
  for (const std::string& file : files) {
    std::ifstream in(file, std::ios::binary);
    found.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return found;
}

// ---- changes --------------------------------------------------------------------------------------------------------

std::mt19937_64 rng;

std::size_t below(std::size_t n) { return n ? rng() % n : 0; }

void put(Bytes& input, std::size_t at, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes && at + i < input.size(); ++i)
    input[at + i] = static_cast<std::uint8_t>(value >> 8 * i);
}

void change(Bytes& input, const std::vector<Bytes>& corpus) {
  static const std::uint64_t edges[] = {0, 1, 2, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000,
                                        0xffffffff, 0x7f800000, 0x7fc00000, 1u << 20, ~std::uint64_t{0}};
  const std::size_t at = below(input.size());
  switch (below(10)) {
    case 0: put(input, at, std::uint64_t{1} << below(8) ^ (input.empty() ? 0 : input[at]), 1); break;
    case 1: put(input, at, rng(), 1); break;
    case 2: put(input, at, (input.empty() ? 0 : input[at]) + below(9) - 4, 1); break;
    case 3: put(input, at, edges[below(16)], std::size_t{1} << below(4)); break;
    case 4: put(input, at, recent[below(kRecent)], std::size_t{1} << below(4)); break;
    case 5: {
      Bytes more(1 + below(8));
      for (std::uint8_t& byte : more) byte = static_cast<std::uint8_t>(below(4) ? rng() : 0);
      input.insert(input.begin() + static_cast<long>(at), more.begin(), more.end());
      break;
    }
    case 6: input.erase(input.begin() + static_cast<long>(at), input.begin() + static_cast<long>(at + below(input.size() - at + 1))); break;
    case 7: {
      const Bytes other = corpus.empty() ? Bytes{} : corpus[below(corpus.size())];
      const std::size_t from = below(other.size()), size = below(other.size() - from + 1);
      input.resize(std::min(input.size(), at));
      input.insert(input.end(), other.begin() + static_cast<long>(from), other.begin() + static_cast<long>(from + size));
      break;
    }
    case 8: {
      const Bytes copy(input.begin() + static_cast<long>(at), input.begin() + static_cast<long>(std::min(input.size(), at + 1 + below(32))));
      const std::size_t to = below(input.size() + 1);
      input.insert(input.begin() + static_cast<long>(to), copy.begin(), copy.end());
      break;
    }
    default: input.resize(input.size() + 1 + below(16), static_cast<std::uint8_t>(rng())); break;
  }
  if (input.size() > kMostBytes) input.resize(kMostBytes);
}

void fuzz(std::vector<Bytes> corpus, double seconds, bool write) {
  for (const Bytes& input : corpus) run(input);
  run({});
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
    for (int i = 0; i < 50; ++i) {
      // Half of the time one of the last that were found.
      const std::size_t last = std::min<std::size_t>(corpus.size(), 64);
      Bytes input = corpus.empty() ? Bytes{} : corpus[below(2) ? corpus.size() - 1 - below(last) : below(corpus.size())];
      for (std::size_t n = 1 + below(5); n > 0; --n) change(input, corpus);
      if (run(input) == 0) continue;
      corpus.push_back(input);
      if (write) save(out_folder, input, "");
    }
  }
}

// Shortest first: each that reaches a place that none before reached.
void reduce(std::vector<Bytes> corpus, const std::string& folder) {
  std::sort(corpus.begin(), corpus.end(), [](const Bytes& a, const Bytes& b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
  });
  for (const Bytes& input : corpus) {
    const std::size_t before = seen.size();
    run(input);
    if (seen.size() > before) save(folder, input, "");
  }
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0;
  std::uint64_t seed = 1;
  std::string reduced;
  bool write = false;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.rfind("seconds=", 0) == 0) seconds = std::atof(argv[i] + 8);
    else if (text.rfind("seed=", 0) == 0) seed = std::strtoull(argv[i] + 5, nullptr, 10);
    else if (text.rfind("out=", 0) == 0) out_folder = argv[i] + 4, write = true;
    else if (text.rfind("reduce=", 0) == 0) reduced = argv[i] + 7;
    else names.push_back(text);
  }
  rng.seed(seed);
  places = static_cast<std::size_t>(&etext - &__executable_start);
  counts = static_cast<std::uint8_t*>(std::calloc(places, 1));
  touched = static_cast<std::uint32_t*>(std::calloc(places, sizeof *touched));
  __sanitizer_set_death_callback(died);
  signal(SIGALRM, too_slow);
  const std::vector<Bytes> given = read(names);
  if (!reduced.empty()) reduce(given, reduced);
  else if (seconds > 0) fuzz(given, seconds, write);
  else for (const Bytes& input : given) run(input);
  std::size_t features = 0;
  for (const auto& [at, orders] : seen) features += static_cast<std::size_t>(__builtin_popcount(orders));
  std::printf("{\"executions\": %llu, \"places\": %zu, \"features\": %zu, \"inputs\": %zu}\n",
              static_cast<unsigned long long>(executions), seen.size(), features, given.size());
  return 0;
}
