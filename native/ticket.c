/* Tickets: what links a job of one engine to a job of another without Python.
 *
 * A ticket fires once, as done or as failed. Firing only detaches the waiting tasks; the caller releases
 * them, so that no chain of tickets, however long, becomes a recursion.
 */
#include <stdlib.h>

#include "stepwell.h"

struct sw_ticket {
    pthread_mutex_t lock;
    enum sw_ticket_state state;
    sw_task *head, *tail;
};

/* NULL: out of memory. */
sw_ticket *sw_ticket_new(void)
{
    sw_ticket *ticket = calloc(1, sizeof *ticket);
    if (ticket)
        pthread_mutex_init(&ticket->lock, NULL);
    return ticket;
}

/* What still waits for it is cancelled. */
void sw_ticket_free(sw_ticket *ticket)
{
    sw_ticket_fire(ticket, 0);
    pthread_mutex_destroy(&ticket->lock);
    free(ticket);
}

int sw_ticket_state(sw_ticket *ticket)
{
    pthread_mutex_lock(&ticket->lock);
    int state = ticket->state;
    pthread_mutex_unlock(&ticket->lock);
    return state;
}

/* Makes `task` wait if the ticket is pending; returns the state that decided. */
int sw_ticket_wait(sw_ticket *ticket, sw_task *task)
{
    pthread_mutex_lock(&ticket->lock);
    int state = ticket->state;
    if (state == SW_PENDING) {
        atomic_fetch_add(&task->owners, 1);
        task->ticket_next = NULL;
        if (ticket->tail)
            ticket->tail->ticket_next = task;
        else
            ticket->head = task;
        ticket->tail = task;
    }
    pthread_mutex_unlock(&ticket->lock);
    return state;
}

/* Fires the ticket and returns its waiting tasks, for sw_release. A second call does nothing. */
sw_task *sw_ticket_take(sw_ticket *ticket, bool ok)
{
    pthread_mutex_lock(&ticket->lock);
    sw_task *waiting = NULL;
    if (ticket->state == SW_PENDING) {
        ticket->state = ok ? SW_DONE : SW_FAILED;
        waiting = ticket->head;
        ticket->head = ticket->tail = NULL;
    }
    pthread_mutex_unlock(&ticket->lock);
    return waiting;
}

void sw_ticket_fire(sw_ticket *ticket, int ok)
{
    sw_release(sw_ticket_take(ticket, ok != 0), ok != 0);
}
