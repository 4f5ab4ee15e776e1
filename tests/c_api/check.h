/* Checks for C programs: print where and what, count, go on. */
#ifndef REPLAYSSM_TESTS_C_API_CHECK_H_
#define REPLAYSSM_TESTS_C_API_CHECK_H_

#include <stdio.h>
#include <string.h>

#include "replayssm/replayssm.h"

static int failures = 0;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                               \
    }                                                                           \
  } while (0)

#define CHECK_OK(call)                                                                       \
  do {                                                                                       \
    const rssm_status status_ = (call);                                                      \
    if (status_ != RSSM_OK) {                                                                \
      fprintf(stderr, "%s:%d: %s: status %d: %s\n", __FILE__, __LINE__, #call, (int)status_, \
              rssm_last_error());                                                            \
      ++failures;                                                                            \
    }                                                                                        \
  } while (0)

/* The call fails with this status, in one line that contains both parts. */
#define CHECK_REFUSED(call, expected, part_a, part_b)                                          \
  do {                                                                                         \
    const rssm_status status_ = (call);                                                        \
    const char* message_ = rssm_last_error();                                                  \
    if (status_ != (expected) || strstr(message_, part_a) == NULL ||                           \
        strstr(message_, part_b) == NULL || strchr(message_, '\n') != NULL) {                  \
      fprintf(stderr, "%s:%d: %s: status %d '%s', expected %d with '%s' and '%s'\n", __FILE__, \
              __LINE__, #call, (int)status_, message_, (int)(expected), part_a, part_b);       \
      ++failures;                                                                              \
    }                                                                                          \
  } while (0)

#endif /* REPLAYSSM_TESTS_C_API_CHECK_H_ */
