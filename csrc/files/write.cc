#include "files/write.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

namespace kvstore {

Written write_pieces(int fd, const Piece* pieces, size_t count, uint64_t offset, size_t most_bytes,
                     size_t most_pieces) {
  std::vector<iovec> call;
  for (size_t i = 0; i < count;) {
    call.clear();
    uint64_t asked = 0;
    do {
      call.push_back({const_cast<void*>(pieces[i].data), pieces[i].size});
      asked += pieces[i++].size;
    } while (i < count && call.size() < most_pieces && asked + pieces[i].size <= most_bytes);
    ssize_t done;
    do done = ::pwritev(fd, call.data(), static_cast<int>(call.size()), static_cast<off_t>(offset));
    while (done < 0 && errno == EINTR);
    if (done < 0) return {errno, asked};
    if (static_cast<uint64_t>(done) != asked) return {0, asked};
    offset += asked;
  }
  return {0, 0};
}

}  // namespace kvstore
