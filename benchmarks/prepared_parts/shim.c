/* A machine's faults, by LD_PRELOAD: a clock that is off by as many seconds as the file $PREPARED_CLOCK holds (a double,
   which may change at any time), no flock(2), and with $PREPARED_NO_RECORD_LOCKS no locks of fcntl(2) either. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double offset(void) {
  static double *shared;
  if (!shared) {
    const char *name = getenv("PREPARED_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    void *found = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return 0;
    shared = found;
  }
  return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
  int result = syscall(SYS_clock_gettime, clock, told);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += (time_t)offset();
  return result;
}

int gettimeofday(struct timeval *told, void *zone) {
  int result = syscall(SYS_gettimeofday, told, zone);
  if (!result) told->tv_sec += (time_t)offset();
  return result;
}

time_t time(time_t *told) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (told) *told = now.tv_sec;
  return now.tv_sec;
}

int flock(int file, int operation) {
  errno = ENOSYS;
  return -1;
}

int fcntl(int file, int command, ...) {
  va_list rest;
  va_start(rest, command);
  long argument = va_arg(rest, long);
  va_end(rest);
  int locks = command == F_OFD_SETLK || command == F_SETLK;
  if (locks && getenv("PREPARED_NO_RECORD_LOCKS")) {
    errno = ENOSYS;
    return -1;
  }
  return syscall(SYS_fcntl, file, command, argument);
}

int fcntl64(int file, int command, ...) __attribute__((alias("fcntl")));
