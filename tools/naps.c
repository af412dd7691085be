/* Shortens the naps with which MindSpore waits for other ranks; in_rank.py builds and loads it.
 *
 * A rank asks every half second, and every second, whether all are there, and every 3 s for another's address, so 2
 * ranks that start together need 1 to 5 s. shorten_naps() has them ask every 20 ms at first, and ever more rarely: no
 * nap is longer than a tenth of the time since then, so nobody waits much longer than needed, or asks often for long. */
#define _GNU_SOURCE
#include "linker_table.h"

#include <errno.h>
#include <math.h>
#include <time.h>

static double start;
static int replaced; /* entries of the linker's tables */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* As nanosleep() and sleep(). They must not call these: where a folder above is called mindspore, this library's own
 * calls are replaced, too. */
int nap(const struct timespec *asked, struct timespec *left)
{
    double most = fmax(0.02, (now() - start) / 10);
    struct timespec shorter = *asked;
    if ((double)asked->tv_sec + 1e-9 * (double)asked->tv_nsec > most) {
        shorter.tv_sec = (time_t)most;
        shorter.tv_nsec = (long)(1e9 * (most - floor(most)));
    }
    errno = clock_nanosleep(CLOCK_MONOTONIC, 0, &shorter, left);
    return errno ? -1 : 0;
}

static unsigned long_nap(unsigned seconds)
{
    struct timespec asked = {.tv_sec = (time_t)seconds};
    nap(&asked, NULL);
    return 0;
}

static void *choose(const char *name, void *before)
{
    void *own = strcmp(name, "nanosleep") == 0 ? (void *)nap : strcmp(name, "sleep") == 0 ? (void *)long_nap : NULL;
    if (!own || own == before)
        return NULL;
    replaced++;
    return own;
}

/* Returns how many calls are replaced. */
int shorten_naps(void)
{
    start = now();
    look_at_calls(choose);
    return replaced;
}
