/* Shortens the naps with which MindSpore waits for other ranks; naps.py builds and loads it.
 *
 * A rank asks every half second, and every second, whether all are there, and every 3 s for another's address, so 2
 * ranks that start together need 1 to 5 s. shorten_naps() has them ask every 20 ms at first, and ever more rarely: most
 * naps are no longer than a tenth of the time since then, so nobody waits much longer than needed, or asks often for
 * long. */
#define _GNU_SOURCE
#include "linker_table.h"

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

/* Sleep as long as asked, or as allowed if that is shorter. */
static int shorter_of(struct timespec time, double most, struct timespec *left)
{
    if ((double)time.tv_sec + 1e-9 * (double)time.tv_nsec > most) {
        time.tv_sec = (time_t)most;
        time.tv_nsec = (long)(1e9 * (most - floor(most)));
    }
    return nanosleep(&time, left);
}

/* As nanosleep(), with which MindSpore asks thousands of times. */
int nap(const struct timespec *asked, struct timespec *left)
{
    return shorter_of(*asked, fmax(0.02, (now() - start) / 10), left);
}

/* As sleep(), after which it gives up the 20th time, in some versions: so only some are shorter. */
unsigned long_nap(unsigned seconds)
{
    static int naps;
    struct timespec asked = {.tv_sec = (time_t)seconds};
    shorter_of(asked, ldexp(0.02, naps < 12 ? naps++ : 12), NULL);
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
