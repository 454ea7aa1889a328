/** The keys of the dashboard, for the help and for Settings. */
export const KEYS = {
  title: 'Keyboard shortcuts',
  groups: [
    {
      title: 'Everywhere',
      keys: [
        ['⌘ K, Ctrl K', 'Search for a page, an object or an action'],
        ['/', 'Filter the list of the page'],
        ['?', 'Show these keys'],
        ['Esc', 'Close a dialog or a menu'],
      ],
    },
    {
      title: 'Lists',
      keys: [
        ['j', 'Next row'],
        ['k', 'Previous row'],
        ['Enter', 'Open the row'],
      ],
    },
    {
      title: 'Go to',
      keys: [
        ['g o', 'Overview'],
        ['g j', 'Jobs'],
        ['g q', 'Queue'],
        ['g i', 'Incidents'],
        ['g f', 'Fleets'],
        ['g r', 'Reports'],
        ['g d', 'Drills'],
        ['g s', 'Submit a job'],
      ],
    },
  ],
} as const
