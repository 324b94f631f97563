/* The smallest worker: notes its pid and the time (CLOCK_MONOTONIC, ns) at its rank's place in the file that its
 * argument names, then waits for its end. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    const char *rank = getenv("RANK");
    struct timespec now;
    if (count != 2 || !rank)
        return 2;
    int notes = open(arguments[1], O_WRONLY);
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t note[2] = {getpid(), now.tv_sec * INT64_C(1000000000) + now.tv_nsec};
    if (pwrite(notes, note, sizeof note, atoi(rank) * (off_t)sizeof note) != sizeof note)
        return 1;
    close(notes); /* or an agent may wait to see whether it is being written */
    pause();
    return 0;
}
