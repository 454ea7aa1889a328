/** Every text of the Overview. */
import { plural } from '../model/format'

export const OVERVIEW = {
  title: 'Overview',
  verdict: {
    act: (count: number) => `${plural(count, 'item')} ${count === 1 ? 'needs' : 'need'} you.`,
    calm: 'Nothing needs you.',
    recovering: (count: number) => `${plural(count, 'job')} ${count === 1 ? 'recovers' : 'recover'}.`,
    training: (count: number) => `${plural(count, 'job')} ${count === 1 ? 'trains' : 'train'}.`,
    empty: 'No job has been submitted yet.',
  },
  jobs: 'Jobs by status',
  attention: { title: 'Needs attention', none: 'No job, fleet or node needs a person.' },
  incidents: { title: 'Open incidents', none: 'No incident is open.', since: (time: string) => `for ${time}` },
  today: {
    title: 'Today (UTC)',
    more: 'Reports',
    ettr: 'Useful time (ETTR)',
    ettrNote: 'training ÷ time with nodes',
    cost: 'Cost of jobs',
    costNote: (nodeHours: string) => `${nodeHours} node hours`,
    failures: 'Failures',
    failuresNote: (cost: string) => `cost ${cost}`,
    spares: 'Cost of idle spares',
    sparesNote: (nodeHours: string) => `${nodeHours} node hours`,
  },
  capacity: {
    title: 'Fleet capacity',
    none: 'No fleet is registered.',
    columns: {
      fleet: 'Fleet',
      status: 'Status',
      use: 'In use',
      spare: 'Spare',
      held: 'Out of use',
      missing: 'Missing',
      limit: 'Limit',
    },
  },
} as const
