/** Every text of the list of jobs. */
import { count, plural } from '../model/format'

const verb = (number: number, singular: string, rest: string): string => (number === 1 ? singular : rest)

export const JOBS = {
  title: 'Jobs',
  verdict: {
    attention: (number: number) => `${plural(number, 'job')} ${verb(number, 'needs', 'need')} attention.`,
    recovering: (number: number) => `${plural(number, 'job')} ${verb(number, 'recovers', 'recover')} from a failure.`,
    calm: 'No job needs attention.',
    idle: 'No job runs.',
    training: (number: number) => `${count(number)} ${verb(number, 'trains', 'train')}.`,
    alsoRecovering: (number: number) => `${count(number)} ${verb(number, 'recovers', 'recover')}.`,
    queued: (number: number) => `${count(number)} ${verb(number, 'waits', 'wait')} for nodes.`,
    starting: (number: number) =>
      `${count(number)} ${verb(number, 'starts', 'start')} or ${verb(number, 'stops', 'stop')}.`,
    paused: (number: number) => `${count(number)} ${verb(number, 'is', 'are')} paused.`,
  },
  /** How many jobs of a status need a person. */
  ofThem: (number: number) => `${count(number)} ${verb(number, 'needs', 'need')} you`,
  submit: 'New job',
  empty: { title: 'No job yet', text: 'Submit a job with this command or with the form.' },
  filter: { label: 'Filter by name or reason', placeholder: 'Name or reason  ( / )' },
  statuses: 'Filter by status',
  all: 'All',
  fleet: { label: 'Fleet', any: 'Any fleet' },
  shown: (shown: number, all: number) =>
    shown === all ? plural(all, 'job') : `${count(shown)} of ${plural(all, 'job')}`,
  none: 'No job matches the filters.',
  clear: 'Clear filters',
  choose: (name: string) => `Choose ${name}`,
  pause: (number: number) => `Pause ${plural(number, 'job')}`,
  stop: (number: number) => `Stop ${plural(number, 'job')}`,
  stopDialog: {
    verb: 'Stop',
    several: (number: number) => plural(number, 'job'),
    effect: 'All ranks stop at the same step, and that step is saved in S3. A stopped job cannot start again.',
  },
  openIncidents: (incidents: string) => `${incidents}, open`,
  committed: (step: string) => `Committed step: ${step}`,
  loss: (first: string, last: string) => `Loss from ${first} to ${last}`,
  menus: {
    columns: 'Columns',
    defaultColumns: 'Default columns',
    views: 'Views',
    savedViews: 'Saved views',
    noViews: 'No view is saved in this browser.',
    save: 'Save this view…',
    saveTitle: 'Save this view',
    saveText: 'A view keeps the filters, the order and the columns of the list in this browser.',
    name: 'Name',
    confirm: 'Save',
    remove: (name: string) => `Delete the view ${name}`,
  },
  /** In the order of the table. */
  columns: {
    name: { label: 'Job' },
    status: { label: 'Status' },
    reason: { label: 'Reason' },
    progress: { label: 'Progress' },
    loss: { label: 'Loss', title: 'The training loss over all steps so far.' },
    left: {
      label: 'Time left',
      title: 'Time for the remaining steps at the mean rate so far, without failures and waits.',
    },
    protection: { label: 'Protection' },
    nodes: { label: 'Nodes', title: 'Nodes that are connected and report no fault, of the nodes that the job needs.' },
    incidents: { label: 'Incidents' },
    ettr: {
      label: 'ETTR',
      title: 'Productive training time divided by the time since the first start, without queueing.',
    },
    cost: { label: 'Cost' },
    fleet: { label: 'Fleet' },
    project: { label: 'Project' },
    priority: { label: 'Priority' },
    duration: { label: 'Run time' },
    created: { label: 'Created' },
  },
} as const
