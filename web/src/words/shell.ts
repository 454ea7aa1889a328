/** Every text of the frame around the pages. */
export const SHELL = {
  skip: 'Skip to the content',
  navigation: 'Main',
  places: {
    overview: 'Overview',
    jobs: 'Jobs',
    queue: 'Queue',
    incidents: 'Incidents',
    fleets: 'Fleets',
    reports: 'Reports',
    drills: 'Drills',
    submit: 'Submit a job',
    settings: 'Settings',
  },
  search: 'Search',
  account: (role: string) => `${role}: account and theme`,
  openIncidents: (count: number) => `${count} open`,
  openIncidentsNote:
    'Open incidents of all jobs: their training has not caught up yet. An acknowledgement does not change the number.',
  live: { word: 'Live', title: 'The server sends each event as it happens.' },
  cut: {
    word: 'Polling',
    title: 'The event stream is interrupted. The page asks for all data every 2 s until the stream is back.',
  },
  stale: { word: 'No answer', title: 'The control plane does not answer. This page shows old data.' },
  outage: (time: string) =>
    `The control plane does not answer. This page shows its answers of ${time} UTC; nothing later is known.`,
  lastKnown: (state: string) => `Last known: ${state}`,
  notSignedOut: 'You are still signed in',
  broken: 'This page has an error',
  notFound: {
    title: 'Page not found',
    empty: 'No page has this address',
    text: 'Search with ⌘K: it finds jobs, incidents, fleets and pages by name.',
  },
} as const

/** Headings of a failed request. */
export const PROBLEM = {
  title: 'This content did not load',
  notFound: 'Not found',
} as const
