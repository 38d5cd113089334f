// Preloaded into a process: the file calls below one folder are counted, made to fail, or recorded, whoever makes them
// (Python, LMDB). shim.py drives it and says what the numbers mean.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum Call { OPEN, PWRITE, WRITE, SYNC, TRUNCATE, ALLOCATE, RENAME, UNLINK, MKDIR, MMAP, READ, CALLS };
enum Event { CREATED = 1, WROTE, ZEROED, CUT, GREW, SYNCED, RENAMED, UNLINKED, MADE, MARKED };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char failing[PATH_MAX], recording[PATH_MAX];  // folders; "" for none
static int fail_call, fail_code, fail_sticky;
static long fail_nth, seen, hits;
static uint8_t* events;
static size_t used, room;
static int64_t number;  // of events

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

// ---- what Python calls ----

void shim_fail(const char* folder, int call, long nth, int code, int sticky) {
  pthread_mutex_lock(&lock);
  snprintf(failing, sizeof failing, "%s", folder);
  fail_call = call, fail_nth = nth, fail_code = code, fail_sticky = sticky, seen = hits = 0;
  pthread_mutex_unlock(&lock);
}

long shim_hits(void) { return hits; }

void shim_record(const char* folder) {
  pthread_mutex_lock(&lock);
  snprintf(recording, sizeof recording, "%s", folder);
  if (*folder) used = 0, number = 0;
  pthread_mutex_unlock(&lock);
}

const uint8_t* shim_events(size_t* nbytes) {
  *nbytes = used;
  return events;
}

// ---- faults ----

static int below(const char* path, const char* folder) {
  const size_t length = strlen(folder);
  return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static void name_of(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
}

// The code that this call of `path` fails with: 0 for none, -1 for half a write.
static int fails(enum Call call, const char* path) {
  if (!*failing || !below(path, failing)) return 0;
  pthread_mutex_lock(&lock);
  int code = 0;
  if (call == (enum Call)fail_call) {
    ++seen;
    if (fail_sticky ? seen >= fail_nth : seen == fail_nth) ++hits, code = fail_code;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

static int fails_fd(enum Call call, int fd) {
  if (!*failing) return 0;
  char path[PATH_MAX];
  name_of(fd, path);
  return fails(call, path);
}

// ---- recording: kind, inode, two numbers, bytes ----

static void put(const void* data, size_t nbytes) {
  if (used + nbytes > room) {
    room = (used + nbytes) * 2 + (1 << 20);
    events = realloc(events, room);
    if (!events) abort();
  }
  memcpy(events + used, data, nbytes);
  used += nbytes;
}

// Under the lock. Returns the number of the event.
static int64_t event(enum Event kind, uint64_t inode, int64_t a, int64_t b, const void* data, size_t nbytes) {
  const int64_t head[5] = {kind, (int64_t)inode, a, b, (int64_t)nbytes};
  put(head, sizeof head);
  put(data, nbytes);
  return number++;
}

// The inode of a file that is recorded; 0 for others.
static uint64_t recorded(int fd, char* path) {
  if (!*recording) return 0;
  const int before = errno;
  struct stat found;
  name_of(fd, path);
  const uint64_t inode = below(path, recording) && !fstat(fd, &found) ? found.st_ino : 0;
  errno = before;
  return inode;
}

void shim_mark(const void* data, size_t nbytes) {
  pthread_mutex_lock(&lock);
  if (*recording) event(MARKED, 0, 0, 0, data, nbytes);
  pthread_mutex_unlock(&lock);
}

// Before a write: what is on its way may reach the disk at any time. Returns the number of the event, -1 for none.
static int64_t wrote(int fd, const struct iovec* parts, int count, int64_t offset) {
  char path[PATH_MAX];
  const uint64_t inode = recorded(fd, path);
  if (!inode) return -1;
  size_t all = 0;
  for (int i = 0; i < count; ++i) all += parts[i].iov_len;
  pthread_mutex_lock(&lock);
  const int64_t mine = event(WROTE, inode, offset, 0, "", 0);
  for (int i = 0; i < count; ++i) put(parts[i].iov_base, parts[i].iov_len);
  const int64_t size = (int64_t)all;
  memcpy(events + used - all - 8, &size, 8);
  pthread_mutex_unlock(&lock);
  return mine;
}

// Events before `before` of this file are durable; only event `only` if that is not -1.
static void synced(uint64_t inode, const char* path, int64_t before, int64_t only) {
  pthread_mutex_lock(&lock);
  if (*recording) event(SYNCED, inode, before, only, path, strlen(path));
  pthread_mutex_unlock(&lock);
}

static void named(enum Event kind, const char* path, const char* other, uint64_t inode) {
  char both[2 * PATH_MAX];
  const int length = snprintf(both, sizeof both, "%s%c%s", path, 0, other);
  pthread_mutex_lock(&lock);
  event(kind, inode, (int64_t)strlen(path), 0, both, (size_t)length);
  pthread_mutex_unlock(&lock);
}

static ssize_t finish_write(int fd, ssize_t done, int64_t mine) {
  if (mine >= 0 && done >= 0 && (fcntl(fd, F_GETFL) & (O_DSYNC | O_SYNC))) {
    char path[PATH_MAX];
    const uint64_t inode = recorded(fd, path);
    synced(inode, path, mine + 1, mine);
  }
  return done;
}

// ---- the calls ----

static int opened(int (*real)(const char*, int, ...), const char* path, int flags, mode_t mode) {
  const int code = fails(OPEN, path);
  if (code) return errno = code < 0 ? EIO : code, -1;
  const int fresh = *recording && below(path, recording) && (flags & O_CREAT) && access(path, F_OK);
  const int fd = real(path, flags, mode);
  char full[PATH_MAX];
  const uint64_t inode = fd >= 0 && (fresh || flags & O_TRUNC) ? recorded(fd, full) : 0;
  if (inode && fresh) named(CREATED, full, "", inode);
  if (inode && !fresh) {
    pthread_mutex_lock(&lock);
    event(CUT, inode, 0, 0, "", 0);
    pthread_mutex_unlock(&lock);
  }
  return fd;
}

#define OPENS(name) \
  int name(const char* path, int flags, ...) { \
    REAL(int, name, const char*, int, ...); \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
      va_list more; \
      va_start(more, flags); \
      mode = va_arg(more, mode_t); \
      va_end(more); \
    } \
    return opened(real, path, flags, mode); \
  }
OPENS(open)
OPENS(open64)

// Writes of `parts` at `offset`: -2 to go on, otherwise the result.
static ssize_t failing_write(enum Call call, int fd, const struct iovec* parts, int count, off_t offset) {
  const int code = fails_fd(call, fd);
  if (!code) return -2;
  if (code > 0) return errno = code, -1;
  REAL(ssize_t, pwritev64, int, const struct iovec*, int, off_t);
  size_t all = 0, part = 0;
  for (int i = 0; i < count; ++i) all += parts[i].iov_len;
  const int flags = fcntl(fd, F_GETFL);  // half a write need not be aligned
  if (flags & O_DIRECT) fcntl(fd, F_SETFL, flags & ~O_DIRECT);
  struct iovec half[1024];
  int n = 0;
  for (; n < count && n < 1024 && part < all / 2; ++n) {
    half[n] = parts[n];
    if (part + half[n].iov_len > all / 2) half[n].iov_len = all / 2 - part;
    part += half[n].iov_len;
  }
  return real(fd, half, n, offset);
}

#define PWRITES(name) \
  ssize_t name(int fd, const void* data, size_t nbytes, off_t offset) { \
    REAL(ssize_t, name, int, const void*, size_t, off_t); \
    const struct iovec all = {(void*)data, nbytes}; \
    const ssize_t failed = failing_write(PWRITE, fd, &all, 1, offset); \
    if (failed != -2) return failed; \
    const int64_t mine = wrote(fd, &all, 1, offset); \
    return finish_write(fd, real(fd, data, nbytes, offset), mine); \
  }
PWRITES(pwrite)
PWRITES(pwrite64)

#define PWRITEVS(name) \
  ssize_t name(int fd, const struct iovec* parts, int count, off_t offset) { \
    REAL(ssize_t, name, int, const struct iovec*, int, off_t); \
    const ssize_t failed = failing_write(PWRITE, fd, parts, count, offset); \
    if (failed != -2) return failed; \
    const int64_t mine = wrote(fd, parts, count, offset); \
    return finish_write(fd, real(fd, parts, count, offset), mine); \
  }
PWRITEVS(pwritev)
PWRITEVS(pwritev64)

#define PWRITEV2S(name) \
  ssize_t name(int fd, const struct iovec* parts, int count, off_t offset, int how) { \
    REAL(ssize_t, name, int, const struct iovec*, int, off_t, int); \
    const ssize_t failed = failing_write(PWRITE, fd, parts, count, offset); \
    if (failed != -2) return failed; \
    const int64_t mine = wrote(fd, parts, count, offset); \
    return finish_write(fd, real(fd, parts, count, offset, how), mine); \
  }
PWRITEV2S(pwritev2)
PWRITEV2S(pwritev64v2)

ssize_t writev(int fd, const struct iovec* parts, int count) {
  REAL(ssize_t, writev, int, const struct iovec*, int);
  if (!*failing && !*recording) return real(fd, parts, count);
  const off_t offset = lseek(fd, 0, SEEK_CUR);
  const ssize_t failed = failing_write(WRITE, fd, parts, count, offset);
  if (failed != -2) return failed;
  const int64_t mine = wrote(fd, parts, count, offset);
  return finish_write(fd, real(fd, parts, count), mine);
}

ssize_t write(int fd, const void* data, size_t nbytes) {
  REAL(ssize_t, write, int, const void*, size_t);
  if (!*failing && !*recording) return real(fd, data, nbytes);
  const struct iovec all = {(void*)data, nbytes};
  const off_t offset = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  const ssize_t failed = failing_write(WRITE, fd, &all, 1, offset);
  if (failed != -2) return failed;
  const int64_t mine = wrote(fd, &all, 1, offset);
  return finish_write(fd, real(fd, data, nbytes), mine);
}

#define SYNCS(name) \
  int name(int fd) { \
    REAL(int, name, int); \
    const int code = fails_fd(SYNC, fd); \
    if (code) return errno = code < 0 ? EIO : code, -1; \
    char path[PATH_MAX]; \
    const uint64_t inode = recorded(fd, path); \
    const int64_t before = number; \
    const int done = real(fd); \
    if (inode && !done) synced(inode, path, before, -1); \
    return done; \
  }
SYNCS(fdatasync)
SYNCS(fsync)

// kind: what is recorded, with `a` and `b`, before the call is made.
static void resized(int fd, enum Event kind, int64_t a, int64_t b) {
  char path[PATH_MAX];
  const uint64_t inode = recorded(fd, path);
  if (!inode) return;
  pthread_mutex_lock(&lock);
  event(kind, inode, a, b, "", 0);
  pthread_mutex_unlock(&lock);
}

#define TRUNCATES(name) \
  int name(int fd, off_t nbytes) { \
    REAL(int, name, int, off_t); \
    const int code = fails_fd(TRUNCATE, fd); \
    if (code) return errno = code < 0 ? EIO : code, -1; \
    resized(fd, CUT, nbytes, 0); \
    return real(fd, nbytes); \
  }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

#define ALLOCATES(name) \
  int name(int fd, off_t offset, off_t nbytes) { \
    REAL(int, name, int, off_t, off_t); \
    const int code = fails_fd(ALLOCATE, fd); \
    if (code) return real(fd, offset, nbytes / 3 + 1), code < 0 ? ENOSPC : code; \
    resized(fd, GREW, offset + nbytes, 0); \
    return real(fd, offset, nbytes); \
  }
ALLOCATES(posix_fallocate)
ALLOCATES(posix_fallocate64)

#define FALLOCATES(name) \
  int name(int fd, int mode, off_t offset, off_t nbytes) { \
    REAL(int, name, int, int, off_t, off_t); \
    const int code = fails_fd(ALLOCATE, fd); \
    if (code) return errno = code < 0 ? ENOSPC : code, -1; \
    const int zeros = mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE); \
    if (zeros) resized(fd, ZEROED, offset, nbytes); \
    if (!(mode & FALLOC_FL_KEEP_SIZE)) resized(fd, GREW, offset + nbytes, 0); \
    return real(fd, mode, offset, nbytes); \
  }
FALLOCATES(fallocate)
FALLOCATES(fallocate64)

static void followed(enum Event kind, const char* path, const char* other) {
  if (below(path, recording)) named(kind, path, other, 0);
}

int rename(const char* path, const char* other) {
  REAL(int, rename, const char*, const char*);
  const int code = fails(RENAME, path);
  if (code) return errno = code < 0 ? EIO : code, -1;
  const int done = real(path, other);
  if (!done) followed(RENAMED, path, other);
  return done;
}

int unlink(const char* path) {
  REAL(int, unlink, const char*);
  const int code = fails(UNLINK, path);
  if (code) return errno = code < 0 ? EIO : code, -1;
  const int done = real(path);
  if (!done) followed(UNLINKED, path, "");
  return done;
}

int mkdir(const char* path, mode_t mode) {
  REAL(int, mkdir, const char*, mode_t);
  const int code = fails(MKDIR, path);
  if (code) return errno = code < 0 ? EIO : code, -1;
  const int done = real(path, mode);
  if (!done) followed(MADE, path, "");
  return done;
}

#define MMAPS(name) \
  void* name(void* at, size_t nbytes, int protect, int flags, int fd, off_t offset) { \
    REAL(void*, name, void*, size_t, int, int, int, off_t); \
    const int code = fd >= 0 ? fails_fd(MMAP, fd) : 0; \
    if (code) return errno = code < 0 ? ENOMEM : code, MAP_FAILED; \
    return real(at, nbytes, protect, flags, fd, offset); \
  }
MMAPS(mmap)
MMAPS(mmap64)

#define PREADS(name) \
  ssize_t name(int fd, void* data, size_t nbytes, off_t offset) { \
    REAL(ssize_t, name, int, void*, size_t, off_t); \
    const int code = fails_fd(READ, fd); \
    if (code > 0) return errno = code, -1; \
    return real(fd, data, code ? nbytes / 2 : nbytes, offset); \
  }
PREADS(pread)
PREADS(pread64)
