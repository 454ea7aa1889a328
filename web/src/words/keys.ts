/** The keys of the dashboard, for the help and for Settings. */
import { PLACES, SUBMIT } from '../model/places'
import { SHELL } from './shell'

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
      keys: [...PLACES, SUBMIT].map(({ name, key }) => [`g ${key}`, SHELL.places[name]] as const),
    },
  ],
} as const
