// What every part makes of inputs by chance, for comparing machines: two that run the same program must write the same
// file, whatever the level that KVSTORE_CPU names. Stops if twins disagree with each other. The parts are those of
// tests/fuzz/targets, which get the inputs that are kept for them first, and the kernels of kernels.cc.
//
//   machines FILE CASES [PART...]
//
// CASES: of every part so many inputs of which something was made; others, say of models that are refused, are not
// counted.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "fuzz.h"

// The entry points of the targets, each with a name of its own; with -DFEW of those alone that have, or call, NEON by
// hand.
#ifdef FEW
#define EVERY_PART(DO) DO(splitzip) DO(entropy) DO(rans) DO(predictive) DO(levels) DO(trie) DO(kernels)
#else
#define EVERY_PART(DO)                                                                                          \
  DO(splitzip) DO(entropy) DO(rans) DO(predictive) DO(levels) DO(lossy) DO(donor) DO(groups) DO(steps) DO(aqua) \
  DO(trie) DO(kernels)
#endif
#define DECLARED(NAME) extern "C" int try_##NAME(const std::uint8_t* data, std::size_t size);
EVERY_PART(DECLARED)

namespace {

struct Named {
  const char* name;
  int (*run)(const std::uint8_t* data, std::size_t size);
};

#define LISTED(NAME) {#NAME, try_##NAME},
constexpr Named kParts[] = {EVERY_PART(LISTED)};

constexpr int kMostTries = 50;

fuzz::Bytes made;

void keep(const void* data, std::size_t size) {
  const auto* const bytes = static_cast<const std::uint8_t*>(data);
  made.insert(made.end(), bytes, bytes + size);
}

bool wanted(const char* name, int count, char** names) {
  for (int i = 0; i < count; ++i)
    if (std::strcmp(name, names[i]) == 0) return true;
  return count == 0;
}

// Of a third nothing is changed, and of those every second one is short: most inputs of chance are damaged somewhere.
fuzz::Bytes input_of(fuzz::Random& random, int number) {
  fuzz::Bytes input(static_cast<std::size_t>(random.between(0, number % 3 == 0 ? 40 : 600)));
  for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random.next());
  return input;
}

// The inputs of a target that the repository keeps, in the order of their names.
std::vector<fuzz::Bytes> kept_of(const char* name) {
  namespace files = std::filesystem;
  const files::path folder = files::path(ROOT) / "tests/fuzz/corpus" / name;
  std::vector<files::path> paths;
  if (files::exists(folder))
    for (const auto& entry : files::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<fuzz::Bytes> inputs;
  for (const files::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

// What became of the inputs of a part.
struct Tried {
  int inputs = 0, useful = 0;
  std::size_t bytes = 0;
};

bool try_one(const Named& part, const fuzz::Bytes& input, std::FILE* file, Tried& tried) {
  made.clear();
  std::fprintf(stderr, "%s %d\n", part.name, tried.inputs);  // the last line is what was tried where it ends
  part.run(input.data(), input.size());
  const int number = tried.inputs++;
  if (made.empty()) return true;
  ++tried.useful;
  tried.bytes += made.size();
  std::fprintf(file, "%s %d %zu\n", part.name, number, made.size());
  return std::fwrite(made.data(), 1, made.size(), file) == made.size();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: machines FILE CASES [PART...]\n"), 2;
  std::FILE* const file = std::fopen(argv[1], "wb");
  if (file == nullptr) return std::perror(argv[1]), 2;
  fuzz::told = keep;
  const int cases = std::atoi(argv[2]);
  std::uint64_t seed = 0;
  for (const Named& part : kParts) {
    seed += 1u << 20;
    if (!wanted(part.name, argc - 3, argv + 3)) continue;
    Tried tried;
    fuzz::beyond = nullptr;
    for (const fuzz::Bytes& input : kept_of(part.name))
      if (!try_one(part, input, file, tried)) return std::perror(argv[1]), 2;
    const int kept = tried.inputs, from = tried.useful;
    while (tried.useful - from < cases && tried.inputs - kept < kMostTries * cases) {
      fuzz::Random random(seed + static_cast<std::uint64_t>(tried.inputs));
      fuzz::beyond = &random;
      if (!try_one(part, input_of(random, tried.inputs), file, tried)) return std::perror(argv[1]), 2;
    }
    std::printf("%s inputs=%d useful=%d bytes=%zu level=%s\n", part.name, tried.inputs, tried.useful, tried.bytes,
                kvstore::level_name(kvstore::level()));
    std::fflush(stdout);
  }
  return std::fclose(file) == 0 ? 0 : (std::perror(argv[1]), 2);
}
